"""Stateless random numbers: right in distribution, and the same however the work is divided."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megatron.kernels.dropout_add import dropout_add
from megatron.kernels.hashing import mix
from megatron.kernels.initial_values import Distribution
from megatron.parallel.mesh import Axis
from megatron.parallel.rng import (
    attention_dropout,
    attention_keys,
    attention_seed,
    draw_weights_,
    hidden_dropout,
    hidden_keys,
    seeded,
)
from megatron.parallel.shard_spec import Dimension, ShardSpec


def _spec(
    shape: tuple[int, ...], splits: dict[int, tuple[int, int]] | None = None, padded: int | None = None
) -> ShardSpec:
    """A matrix of some shape; `splits` maps a dimension to (rank, size) of the axis that splits it."""
    axes = {
        dimension: Axis(f"axis{dimension}", rank, size, tuple(range(size)))
        for dimension, (rank, size) in (splits or {}).items()
    }
    dimensions = tuple(
        Dimension(f"d{place}", size, axes.get(place), padded if place == 0 else None)
        for place, size in enumerate(shape)
    )
    return ShardSpec(dimensions, is_matrix=True, init_std=0.5)


def _draw(spec: ShardSpec, *, name: str = "w", first: int = 0, last: int | None = None) -> torch.Tensor:
    count = math.prod(spec.local_shape)
    part = draw_weights_(torch.full(((count if last is None else last) - first,), 9.0), spec, 1234, name, first=first)
    return part.view(spec.local_shape) if last is None and first == 0 else part


def _dropped(
    x: torch.Tensor, *, ids: list[int], layer: int = 3, seed: int = 1, probability: float = 0.1
) -> torch.Tensor:
    sample_ids = torch.tensor(ids)
    return dropout_add(
        x, hidden_dropout(probability, keys=hidden_keys(seed, layer), sample_ids=sample_ids, length=x.shape[1])
    )


def test_mix_is_splitmix64() -> None:
    # the first outputs of splitmix64 from state 0, as published with xoshiro by Vigna
    assert mix(0) == 0xE220A8397B1DCDAF
    assert len({mix(a, b) for a in range(50) for b in range(50)}) == 2500


def test_weights_do_not_depend_on_the_split() -> None:
    whole = _draw(_spec((36, 21)))
    for splits in ({0: (1, 2)}, {0: (2, 4)}, {1: (1, 3)}, {0: (5, 6), 1: (2, 7)}):
        spec = _spec((36, 21), splits)
        box = tuple(slice(start, stop) for start, stop in zip(spec.start, spec.stop, strict=True))
        assert torch.equal(_draw(spec), whole[box])
    padded = _draw(_spec((37, 21), {0: (1, 2)}, padded=40))
    assert torch.equal(padded[:17], _draw(_spec((37, 21)))[20:])
    assert not padded[17:].any()
    assert not _draw(_spec((37, 21), {0: (3, 4)}, padded=64)).any()
    assert torch.equal(_draw(_spec((50,), {0: (1, 5)})), _draw(_spec((50,)))[10:20])


@pytest.mark.parametrize("distribution", [Distribution.UNIFORM, Distribution.TRUNCATED_NORMAL])
def test_other_distributions(distribution: Distribution) -> None:
    def draw(spec: ShardSpec, **part: int) -> torch.Tensor:
        return _draw(dataclasses.replace(spec, init_distribution=distribution), **part)

    values = draw(_spec((2000, 501)))
    for splits in ({0: (1, 2)}, {1: (1, 3)}):
        spec = _spec((2000, 501), splits)
        box = tuple(slice(start, stop) for start, stop in zip(spec.start, spec.stop, strict=True))
        assert torch.equal(draw(spec), values[box])
    assert torch.equal(draw(_spec((2000, 501)), first=1001, last=1100), values.flatten()[1001:1100])
    values = values.double() / 0.5
    count, edge = values.numel(), math.sqrt(3) if distribution is Distribution.UNIFORM else 3.0
    assert 0.99 * edge < values.abs().max() < edge * 1.000001
    assert abs(values.mean()) < 4 / count**0.5
    for quantile in (-2.9, -1.5, -1.0, 0.0, 0.5, 1.7, 2.5):
        point = torch.tensor(quantile).double()
        expected = (point / math.sqrt(3) + 1) / 2
        if distribution is Distribution.TRUNCATED_NORMAL:
            tail = torch.special.ndtr(torch.tensor(-3.0).double())
            expected = (torch.special.ndtr(point) - tail) / (1 - 2 * tail)
        expected = expected.clamp(0, 1)
        assert (
            abs((values < quantile).double().mean() - expected)
            < 4.5 * (expected * (1 - expected) / count) ** 0.5 + 1e-9
        )
    for shifted in (values.roll(1, 0), values.roll(1, 1), values.roll(2, 1)):
        assert abs((values * shifted).mean()) < 4.5 / count**0.5


def test_weights_are_normal_and_independent() -> None:
    values = _draw(_spec((2000, 501))).double() / 0.5
    count = values.numel()
    assert abs(values.mean()) < 4 / count**0.5
    assert abs(values.var() - 1) < 4 * (2 / count) ** 0.5
    assert abs(values.pow(3).mean()) < 4 * (15 / count) ** 0.5
    assert abs(values.pow(4).mean() - 3) < 4 * (96 / count) ** 0.5
    for quantile in (-3, -2, -1, 0, 1, 2, 3):  # the distribution function at whole standard deviations
        share, expected = (
            (values < quantile).double().mean(),
            torch.special.ndtr(torch.tensor(float(quantile)).double()),
        )
        assert abs(share - expected) < 4 * (expected * (1 - expected) / count) ** 0.5
    for shifted in (values.roll(1, 0), values.roll(1, 1), values.roll(2, 1), values.roll((1, 1), (0, 1))):
        assert abs((values * shifted).mean()) < 4 / count**0.5
        assert abs((values.square() * shifted.square()).mean() - 1) < 4 * 8**0.5 / count**0.5
    other = _draw(_spec((2000, 501)), name="v").double() / 0.5
    assert abs((values * other).mean()) < 4 / count**0.5
    assert 4.5 < values.abs().max() < 6.67


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.01])
def test_dropout_rate_scale_and_independence(probability: float) -> None:
    x = torch.ones(8, 300, 257)
    kept = (_dropped(x, ids=list(range(8)), probability=probability) != 0).double()
    count = kept.numel()
    spread = (probability * (1 - probability)) ** 0.5
    assert abs(kept.mean() - (1 - probability)) < 4 * spread / count**0.5 + 1e-5
    centred = (kept - kept.mean()) / spread
    for dimension in (0, 1, 2):
        for shift in (1, 2, 7):
            assert abs((centred * centred.roll(shift, dimension)).mean()) < 4.5 / count**0.5
    for dimensions in ((0, 1), (0, 2), (1, 2)):  # every sample, position and channel is hit equally often
        shares = centred.mean(dim=dimensions) * (count / centred.mean(dim=dimensions).numel()) ** 0.5
        assert shares.abs().max() < 5
        assert 0.5 < shares.var() < 1.6 or shares.numel() < 50
    for other in ({"layer": 4}, {"seed": 2}):
        unlike = (_dropped(x, ids=list(range(8)), probability=probability, **other) != 0).double()
        assert abs((centred * (unlike - unlike.mean()) / spread).mean()) < 4.5 / count**0.5
    assert abs(_dropped(x, ids=list(range(8)), probability=probability).double().mean() - 1) < 0.01


def test_dropout_does_not_depend_on_the_batch() -> None:
    x = torch.randn(4, 16, 10)
    whole = _dropped(x, ids=[7, 100, 3, 2**40])
    for row, sample in enumerate([7, 100, 3, 2**40]):
        assert torch.equal(_dropped(x[row : row + 1], ids=[sample])[0], whole[row])
    assert torch.equal(_dropped(x[:, :5], ids=[7, 100, 3, 2**40]), whole[:, :5])
    ids = torch.tensor([7, 100, 3, 2**40])
    later = hidden_dropout(0.1, keys=hidden_keys(1, 3), sample_ids=ids, length=x.shape[1] - 5, first_position=5)
    assert torch.equal(dropout_add(x[:, 5:], later), whole[:, 5:])


def test_dropout_backward_uses_the_same_mask() -> None:
    for width in (10, 11):
        x = torch.randn(2, 6, width, requires_grad=True)
        y = _dropped(x, ids=[1, 2], probability=0.4)
        y.backward(torch.ones_like(y))
        torch.testing.assert_close(x.grad * x.detach(), y.detach())
        assert 0 < (y == 0).sum() < y.numel()


def test_dropout_off() -> None:
    x = torch.randn(1, 2, 3)
    assert _dropped(x, ids=[0], probability=0.0) is x
    assert not _dropped(x, ids=[0], probability=1.0).any()


def test_dropout_keeps_bfloat16() -> None:
    x = torch.randn(2, 4, 64)
    half = _dropped(x.bfloat16(), ids=[1, 2])
    assert half.dtype == torch.bfloat16
    assert torch.equal(half == 0, _dropped(x, ids=[1, 2]) == 0)


def test_seeded_repeats_and_restores() -> None:
    before = torch.random.get_rng_state()
    with seeded(11, torch.device("cpu")):
        first = torch.rand(3)
    with pytest.raises(ValueError, match="stop"), seeded(11, torch.device("cpu")):
        assert torch.equal(torch.rand(3), first)
        raise ValueError("stop")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_attention_seeds_are_distinct() -> None:
    seeds = {
        attention_seed(seed, sample, layer, rank)
        for seed in (1, 2) for sample in (0, 1, 2**33) for layer in (0, 1) for rank in (0, 1)
    }  # fmt: skip
    assert len(seeds) == 24
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_attention_dropout_is_independent_of_local_heads_and_batch() -> None:
    shape = (3, 8, 40, 33)
    ids = torch.tensor([4, 9, 2])
    settings = {"keys": attention_keys(1, 2), "queries": shape[2]}
    whole = dropout_add(
        torch.ones(shape), attention_dropout(0.2, sample_ids=ids, first_head=0, heads=shape[1], **settings)
    )
    for rank in (0, 1):
        heads = slice(rank * 4, rank * 4 + 4)
        dropout = attention_dropout(0.2, sample_ids=ids[1:2], first_head=rank * 4, heads=4, **settings)
        assert torch.equal(dropout_add(torch.ones(shape)[1:2, heads], dropout), whole[1:2, heads])
    kept = (whole != 0).double()
    assert abs(kept.mean() - 0.8) < 4 * 0.4 / kept.numel() ** 0.5 + 1e-5
    centred = (kept - kept.mean()) / 0.4
    for dimension in range(4):
        assert abs((centred * centred.roll(1, dimension)).mean()) < 4.5 / kept.numel() ** 0.5
    assert attention_dropout(0.0, sample_ids=ids, first_head=0, heads=1, **settings) is None
