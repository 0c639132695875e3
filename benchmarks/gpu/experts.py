"""A slice of a Mixtral-like network on one GPU: one kernel compared with one product per expert, and a capacity."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.records import Target
from benchmarks.gpu.runs import request_of
from benchmarks.gpu.shapes import SHAPES, Shape
from benchmarks.gpu.timing import forget_memory, seconds_per_call
from benchmarks.gpu.training import TOKENS, USUAL_LENGTH, Contender, measured, our_step
from megatron.kernels import grouped
from megatron.kernels.grouped import grouped_linear

# Eight experts, each with the feed-forward layer of a Llama of 1B parameters, in as many blocks as fit with Adam.
EXPERTS, TOP_K, LAYERS = 8, 2, 4
KERNEL, LOOP = "grouped kernel", "loop over experts"
FASTER, NOTHING = Target(at_least=1.0), Target(at_most=0.0)


def measure_experts(context: Context) -> None:
    """Products of all experts alone, experts without rows, and tokens per second of training."""
    shape = SHAPES["llama1b"].tiny() if context.is_tiny else replace(SHAPES["llama1b"], layers=LAYERS)
    length, micro_batch = (16, 2) if context.is_tiny else (USUAL_LENGTH, TOKENS // USUAL_LENGTH)
    _check_without_rows(context, shape)
    _measure_products(context, shape, micro_batch * length * TOP_K)
    _measure_training(context, shape, length, micro_batch)


def _check_without_rows(context: Context, shape: Shape) -> None:
    """Experts that no token chose have gradients, and they are zero."""
    for name, counts in {"no rows": [0] * EXPERTS, "rows of one expert": [0] * (EXPERTS - 1) + [64]}.items():
        x, weight, ends = _operands(context, shape, counts)
        grouped_linear(x, weight, ends).square().sum().backward()
        assert weight.grad is not None
        largest = weight.grad[:-1].abs().max().item()
        context.recorder.figure("largest gradient of an expert without rows", largest, "", target=NOTHING, of=name)


def _measure_products(context: Context, shape: Shape, rows: int) -> None:
    """Forward and backward of the first product for an even load, and for one that two experts get."""
    half = rows // 2
    for load, counts in {
        "even": [rows // EXPERTS] * EXPERTS,
        "two experts": [half, half] + [0] * (EXPERTS - 2),
    }.items():
        x, weight, ends = _operands(context, shape, counts)
        times = {}
        for by in (KERNEL, LOOP):
            with _products_by(by):
                times[by] = seconds_per_call(
                    lambda x=x, weight=weight, ends=ends: grouped_linear(x, weight, ends).sum().backward(),  # type: ignore[misc]
                    context.device,
                    repeats=2 if context.is_tiny else 20,
                )
            context.recorder.figure("time of the products", times[by] * 1e3, "ms", of=by, load=load)
        _compare(context, times[LOOP] / times[KERNEL], of="products", load=load)
        del x, weight
        forget_memory(context.device)


def _measure_training(context: Context, shape: Shape, length: int, micro_batch: int) -> None:
    flags = (
        *("--num-experts", str(EXPERTS), "--moe-router-topk", str(TOP_K)),
        *("--moe-ffn-hidden-size", str(shape.feed_forward), "--moe-aux-loss-coeff", "0.01"),
    )
    capacity = ("--moe-expert-capacity-factor", "1.0")
    forms = {KERNEL: (), LOOP: (), "capacity of 1": capacity}
    if context.device.type == "cuda":
        forms["capacity of 1, --cuda-graphs auto"] = (*capacity, "--cuda-graphs", "auto")
    counted = replace(shape, feed_forward=TOP_K * shape.feed_forward)  # what a token is multiplied with
    rates = {}
    for form, more in forms.items():
        request = request_of(context, shape, length, micro_batch, *flags, *more)
        contender = Contender(form, True, lambda request=request: our_step(request))
        with _products_by(form):
            rates[form] = measured(context, contender, counted, length, micro_batch)
    kernel, loop = rates[KERNEL], rates[LOOP]
    if kernel is not None and loop is not None:
        _compare(context, kernel / loop, of="training", load="trained")


def _compare(context: Context, ratio: float, **details: str) -> None:
    """Records the speedup of the kernel; without one, both are the loop."""
    target = FASTER if context.device.type == "cuda" else None
    context.recorder.figure("grouped kernel in times of the loop", ratio, "", target=target, **details)


def _operands(context: Context, shape: Shape, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, the matrices of gate and up projections, and one past the last row of each expert."""
    torch.manual_seed(1)
    like = {"dtype": torch.bfloat16, "device": context.device}
    x = torch.randn(sum(counts), shape.hidden, **like).requires_grad_()  # type: ignore[arg-type]
    weight = torch.randn(EXPERTS, 2 * shape.feed_forward, shape.hidden, **like).mul_(0.02)  # type: ignore[arg-type]
    return x, weight.requires_grad_(), torch.tensor(counts, device=context.device).cumsum(0)


@contextlib.contextmanager
def _products_by(form: str) -> Iterator[None]:
    """Forces one product per expert, if requested, whatever the device supports."""
    if form != LOOP:
        yield
        return
    with mock.patch.object(grouped, "_has_grouped_kernel", lambda *_: False):
        yield
