"""Inputs of the differentiable operations: small, odd and empty shapes that reach every path of the kernels."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron.kernels.activations import FUNCTIONS, activation, gated
from megatron.kernels.attention.softmax import scaled_softmax
from megatron.kernels.choice import Implementation
from megatron.kernels.dropout_add import Dropout, dropout_add
from megatron.kernels.embedding import lookup
from megatron.kernels.norms import add_norm, layer_norm, rms_norm
from megatron.kernels.rotary import rotate_both, split_heads, split_rotated

EPS = 1e-5
COLUMN_BASE = 0x9E3779B97F4A7C15
Inputs = Mapping[str, torch.Tensor]
Compute = Callable[[Inputs, Implementation], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """An operation on given inputs.

    Attributes:
        inputs: what gets a gradient, in float64, on the CPU.
        compute: the outputs for inputs of any dtype and device; what else it needs follows them.
    """

    label: str
    inputs: Inputs
    compute: Compute


def _random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def _dropout(shape: Sequence[int], like: torch.Tensor, threshold: int = 20000) -> Dropout:
    rows = torch.randint(-(2**62), 2**62, tuple(shape), generator=torch.Generator().manual_seed(9))
    return Dropout(rows.to(like.device), threshold, COLUMN_BASE)


def _softmax_cases() -> Iterator[Case]:
    # Rows of part of a warp, of a warp, of a block, and longer than registers hold; without rows and without keys.
    shapes = [(1, 1, 1, 1), (2, 3, 5, 7), (2, 2, 9, 40), (1, 2, 4, 1031), (1, 1, 3, 2048), (1, 1, 2, 8203)]
    for shape in (*shapes, (0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)):
        for causal, has_mask, has_bias, drops in itertools.product((False, True), repeat=4):
            options = {"causal": causal, "has_mask": has_mask, "drops": drops}
            inputs = {"scores": 3 * _random(*shape)}
            if has_bias:
                inputs["bias"] = _random(1, shape[1], 1, shape[3], seed=4)
            yield Case(f"{shape}, bias {has_bias}, {options}", inputs, partial(_softmax, **options))


def _softmax(
    inputs: Inputs, implementation: Implementation, *, causal: bool, has_mask: bool, drops: bool
) -> list[torch.Tensor]:
    scores = inputs["scores"]
    mask = None
    if has_mask:
        drawn = torch.rand(scores.shape[0], 1, *scores.shape[2:], generator=torch.Generator().manual_seed(1))
        mask = drawn < 0.3
        if mask.numel():
            mask[-1, -1, -1] = True  # a query that sees nothing
        mask = mask.to(scores.device)
    dropout = _dropout(scores.shape[:3], scores) if drops else None
    options: dict[str, Any] = {"causal": causal, "mask": mask, "bias": inputs.get("bias"), "dropout": dropout}
    return [scaled_softmax(scores, 0.37, **options, implementation=implementation)]


def _norm_cases() -> Iterator[Case]:
    # With one or two columns the gradient is zero but for rounding.
    for rows, columns in ((1, 5), (3, 7), (33, 64), (130, 257), (5, 2048), (3, 9001), (0, 8)):
        for subtracts_mean, zero_centered, adds in itertools.product((False, True), repeat=3):
            for has_bias in (False, True)[: 1 + subtracts_mean]:
                inputs = {"x": _random(rows, columns) + 0.5, "weight": 1 + _random(columns) / 4}
                inputs |= {"bias": _random(columns, seed=5)} if has_bias else {}
                inputs |= {"residual": _random(rows, columns, seed=6)} if adds else {}
                inputs |= {"branch_bias": _random(columns, seed=7)} if adds and not zero_centered else {}
                options = {"subtracts_mean": subtracts_mean, "zero_centered": zero_centered}
                label = f"{rows} x {columns}, {', '.join(inputs)}, {options}"
                yield Case(label, inputs, partial(_norm, **options))


def _norm(
    inputs: Inputs, implementation: Implementation, *, subtracts_mean: bool, zero_centered: bool
) -> Sequence[torch.Tensor]:
    options: dict[str, Any] = {"zero_centered": zero_centered, "implementation": implementation}
    x, weight, bias = inputs["x"], inputs["weight"], inputs.get("bias")
    if "residual" in inputs:
        shift, options["branch_bias"] = bias if subtracts_mean else None, inputs.get("branch_bias")
        return add_norm(x, inputs["residual"], weight, shift, EPS, subtract_mean=subtracts_mean, **options)
    return [layer_norm(x, weight, bias, EPS, **options) if subtracts_mean else rms_norm(x, weight, EPS, **options)]


def _activation_cases() -> Iterator[Case]:
    for rows, columns in ((1, 1), (3, 7), (65, 264), (130, 1031), (0, 8)):
        for name, has_bias, is_gated in itertools.product(FUNCTIONS, (False, True), (False, True)):
            if name == "linear" and not is_gated:
                continue
            inputs = {"x": 2 * (_random(rows, 2, columns) if is_gated else _random(rows, columns))}
            inputs |= {"bias": _random((1 + is_gated) * columns, seed=5)} if has_bias else {}
            label = f"{name}, {rows} x {columns}, gated {is_gated}, bias {has_bias}"
            yield Case(label, inputs, partial(_activation, name=name, is_gated=is_gated))


def _activation(inputs: Inputs, implementation: Implementation, *, name: str, is_gated: bool) -> list[torch.Tensor]:
    function = gated if is_gated else activation
    return [function(inputs["x"], name, bias=inputs.get("bias"), implementation=implementation)]


def _dropout_add_cases() -> Iterator[Case]:
    for shape in ((1, 1), (3, 7), (2, 5, 64), (130, 257), (3, 4099), (0, 8)):
        for has_bias, adds, threshold in itertools.product((False, True), (False, True), (0, 6554, 65536)):
            for multiplier in (1.0, 0.25):
                inputs = {"x": _random(*shape)}
                inputs |= {"bias": _random(shape[-1], seed=5)} if has_bias else {}
                inputs |= {"residual": _random(*shape, seed=6)} if adds else {}
                label = f"{shape}, {', '.join(inputs)}, threshold {threshold}, multiplier {multiplier}"
                yield Case(label, inputs, partial(_dropout_add, threshold=threshold, multiplier=multiplier))


def _dropout_add(
    inputs: Inputs, implementation: Implementation, *, threshold: int, multiplier: float
) -> list[torch.Tensor]:
    x = inputs["x"]
    dropout = _dropout(x.shape[:-1], x, threshold) if threshold else None
    others = {name: inputs[name] for name in ("bias", "residual") if name in inputs}
    return [dropout_add(x, dropout, **others, multiplier=multiplier, implementation=implementation)]


def _rotary_cases() -> Iterator[Case]:
    for batch, heads, groups, length, size, width in ((1, 1, 1, 1, 2, 2), (2, 6, 3, 5, 8, 6), (1, 4, 2, 65, 64, 64)):
        for interleaved, is_split, per_sample in itertools.product((False, True), repeat=3):
            if is_split:
                inputs = {"qkv": _random(batch, length, groups, heads // groups + 2, size)}
            else:
                inputs = {
                    "query": _random(batch, heads, length, size), "key": _random(batch, groups, length, size, seed=4)
                }  # fmt: skip
            angles = 3 * _random(batch if per_sample else 1, 1, length, width // 2, seed=8)
            shape = (batch, heads, groups, length, size, width)
            yield Case(
                f"{shape}, interleaved {interleaved}, split {is_split}, per sample {per_sample}",
                inputs,
                partial(_rotary, angles=angles, interleaved=interleaved),
            )
    for shape in ((2, 5, 2, 3, 8), (1, 70, 1, 5, 16), (3, 130, 3, 3, 24), (2, 9, 2, 4, 8), (0, 4, 2, 3, 8)):
        inputs = {"qkv": _random(*shape), "bias": _random(math.prod(shape[2:]))}
        yield Case(f"{shape}, joined with its bias", inputs, _split_heads)
    empty = {"query": _random(0, 2, 5, 8), "key": _random(0, 2, 5, 8)}
    yield Case("nothing", empty, partial(_rotary, angles=_random(1, 1, 5, 4), interleaved=False))


def _rotary(
    inputs: Inputs, implementation: Implementation, *, angles: torch.Tensor, interleaved: bool
) -> Sequence[torch.Tensor]:
    like = next(iter(inputs.values()))
    wide = torch.promote_types(like.dtype, torch.float32)
    tables = [table.float().to(like.device, wide) for table in (angles.cos(), angles.sin())]
    options: dict[str, Any] = {"interleaved": interleaved, "implementation": implementation}
    if "qkv" in inputs:
        return split_rotated(inputs["qkv"], *tables, **options)
    return rotate_both(inputs["query"], inputs["key"], *tables, **options)


def _split_heads(inputs: Inputs, implementation: Implementation) -> Sequence[torch.Tensor]:
    qkv, bias = inputs["qkv"], inputs["bias"]
    if implementation is Implementation.CSRC:
        return split_heads(qkv, bias)
    biased = qkv + (bias - bias.detach()).view(qkv.shape[2:])  # its gradient alone
    query, key, value = biased.split([qkv.shape[3] - 2, 1, 1], dim=3)
    return [part.flatten(2, 3).transpose(1, 2) for part in (query, key, value)]


def _embedding_cases() -> Iterator[Case]:
    # rows of the shard, columns, shape of the ids, first row; ids are drawn from 1.5 times the shard
    places = [(1, 1, (1,), 0), (7, 5, (2, 33), 3), (50, 130, (3, 1, 40), 0), (300, 600, (513,), 200), (9, 64, (0,), 0)]
    for rows, columns, shape, first_row in places:
        generator = torch.Generator().manual_seed(4)
        ids = torch.randint(first_row - rows // 4, first_row + rows + rows // 4 + 1, shape, generator=generator)
        ids.view(-1)[::3] = first_row  # one id that many positions have
        label = f"{rows} x {columns} from {first_row}, ids {shape}"
        yield Case(label, {"weight": _random(rows, columns)}, partial(_embedding, ids=ids, first_row=first_row))


def _embedding(
    inputs: Inputs, implementation: Implementation, *, ids: torch.Tensor, first_row: int
) -> list[torch.Tensor]:
    weight = inputs["weight"]
    place: dict[str, Any] = {"first_row": first_row, "is_whole": False}
    return [lookup(weight, ids.to(weight.device), **place, implementation=implementation)]


CASES: Mapping[str, Callable[[], Iterator[Case]]] = types.MappingProxyType(
    {
        "activation": _activation_cases,
        "dropout_add": _dropout_add_cases,
        "embedding": _embedding_cases,
        "norm": _norm_cases,
        "rotary": _rotary_cases,
        "softmax": _softmax_cases,
    }
)
