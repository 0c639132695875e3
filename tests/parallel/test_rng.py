"""Stateless random numbers: right in distribution, and the same however the work is divided."""

from __future__ import annotations

import pytest
import torch
from megatron.parallel.placement import Placement, place
from torch import nn

from megatron.errors import ConfigError
from megatron.parallel.rng import attention_dropout, attention_seed, hidden_dropout, mix, normal_, seeded


def _draw(shape: tuple[int, ...], start: tuple[int, ...], stop: tuple[int, ...], *, padding: int = 0, name: str = "w"):
    sides = [last - first for first, last in zip(start, stop, strict=True)]
    sides[0] += padding
    parameter = place(nn.Parameter(torch.full(sides, 9.0)), Placement(shape, start, stop, True))
    return normal_(parameter, 1234, name, 0.5).detach()


def _dropped(
    x: torch.Tensor, *, ids: list[int], layer: int = 3, seed: int = 1, probability: float = 0.1
) -> torch.Tensor:
    return hidden_dropout(x, probability, seed=seed, layer=layer, sample_ids=torch.tensor(ids), training=True)


def test_mix_is_splitmix64() -> None:
    # the first outputs of splitmix64 from state 0, as published with xoshiro by Vigna
    assert mix(0) == 0xE220A8397B1DCDAF
    assert len({mix(a, b) for a in range(50) for b in range(50)}) == 2500


def test_weights_do_not_depend_on_the_split() -> None:
    whole = _draw((37, 21), (0, 0), (37, 21))
    for start, stop in [
        ((0, 0), (18, 21)),
        ((18, 0), (37, 21)),
        ((0, 7), (37, 14)),
        ((5, 3), (6, 4)),
        ((36, 20), (37, 21)),
    ]:
        part = _draw((37, 21), start, stop)
        assert torch.equal(part, whole[start[0] : stop[0], start[1] : stop[1]])
    padded = _draw((37, 21), (20, 0), (37, 21), padding=3)
    assert torch.equal(padded[:17], whole[20:])
    assert not padded[17:].any()
    assert not _draw((37, 21), (37, 0), (37, 21), padding=4).any()
    assert torch.equal(_draw((50,), (11,), (30,)), _draw((50,), (0,), (50,))[11:30])


def test_weights_are_normal_and_unrelated() -> None:
    values = _draw((2000, 501), (0, 0), (2000, 501)).double() / 0.5
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
    other = _draw((2000, 501), (0, 0), (2000, 501), name="v").double() / 0.5
    assert abs((values * other).mean()) < 4 / count**0.5
    assert 4.5 < values.abs().max() < 6.67


def test_weights_of_three_dimensions_are_refused() -> None:
    with pytest.raises(ConfigError, match="w has 3 dimensions"):
        _draw((2, 2, 2), (0, 0, 0), (2, 2, 2))


def test_weights_reach_half_precision() -> None:
    single = normal_(torch.empty(8, 8), 1, "w", 1.0)
    assert torch.equal(normal_(torch.empty(8, 8, dtype=torch.bfloat16), 1, "w", 1.0), single.bfloat16())


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
    together = _dropped(x, ids=[7, 100, 3, 2**40])
    for row, sample in enumerate([7, 100, 3, 2**40]):
        assert torch.equal(_dropped(x[row : row + 1], ids=[sample])[0], together[row])
    assert torch.equal(_dropped(x[:, :5], ids=[7, 100, 3, 2**40]), together[:, :5])


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
    assert hidden_dropout(x, 0.5, seed=1, layer=0, sample_ids=torch.tensor([0]), training=False) is x
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


def test_attention_seed_tells_everything_apart() -> None:
    seeds = {
        attention_seed(seed, torch.tensor([sample, 5]), layer, rank)
        for seed in (1, 2) for sample in (0, 1, 2**33) for layer in (0, 1) for rank in (0, 1)
    }  # fmt: skip
    assert len(seeds) == 24
    assert all(0 <= seed < 2**63 for seed in seeds)
    ids = torch.tensor([4])
    first = attention_seed(1, ids, 0, 0)
    assert attention_seed(1, ids, 0, 0) == first
    ids.add_(1)  # a changed tensor is read again
    assert attention_seed(1, ids, 0, 0) == attention_seed(1, torch.tensor([5]), 0, 0) != first


def test_attention_dropout_does_not_depend_on_heads_or_batch_at_hand() -> None:
    shape = (3, 8, 40, 33)
    ids = torch.tensor([4, 9, 2])
    whole = attention_dropout(torch.ones(shape), 0.2, seed=1, layer=2, sample_ids=ids, first_head=0)
    for rank in (0, 1):
        heads = slice(rank * 4, rank * 4 + 4)
        part = attention_dropout(
            torch.ones(shape)[1:2, heads], 0.2, seed=1, layer=2, sample_ids=ids[1:2], first_head=rank * 4
        )
        assert torch.equal(part, whole[1:2, heads])
    kept = (whole != 0).double()
    assert abs(kept.mean() - 0.8) < 4 * 0.4 / kept.numel() ** 0.5 + 1e-5
    centred = (kept - kept.mean()) / 0.4
    for dimension in range(4):
        assert abs((centred * centred.roll(1, dimension)).mean()) < 4.5 / kept.numel() ** 0.5
    ones = torch.ones(1, 1, 2, 2)
    assert attention_dropout(ones, 0.0, seed=1, layer=2, sample_ids=ids, first_head=0) is ones
