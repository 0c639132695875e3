"""--use-bnb-optimizer: AdamW with moments of 8 bits, and checkpoints that do not know of it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

import pytest
import torch

from megatron.engine.engine import Engine
from megatron.engine.state import owned_pieces, pieces_to_load, refresh_weights
from megatron.errors import ConfigError
from megatron.kernels.optimizer import build_eight_bit_adamw, count_updates, moment
from megatron.parallel.joining import close_mesh, open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.train.start_up.engine_opening import build_engine
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe

RATE, BETAS = 1e-2, (0.9, 0.95)
RECIPE = dataclasses.replace(Recipe(), num_layers=2, steps=6)
HALF = 3


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        ConfigError, match=r"--use-bnb-optimizer requires the package bitsandbytes.*pip install bitsandbytes"
    ):
        build_eight_bit_adamw([], lr=RATE, betas=BETAS)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install bitsandbytes)")


def parameters() -> list[torch.nn.Parameter]:
    """Of more values than 16 blocks, which no block divides; of too few for 8 bits; an embedding."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in (5000, 100, 8192)]


def groups(found: list[torch.nn.Parameter]) -> list[dict]:
    return [
        {"params": found[:2], "weight_decay": 0.1, "eps": 1e-8, "keeps_float32": False},
        {"params": found[2:], "weight_decay": 0.0, "eps": 1e-8, "keeps_float32": True},
    ]


def train(optimizer: torch.optim.Optimizer, found: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in found:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step - 2)
        optimizer.step()


def test_steps_are_near_those_with_moments_of_32_bits() -> None:
    ours, theirs = parameters(), parameters()
    eight_bit = build_eight_bit_adamw(groups(ours), lr=RATE, betas=BETAS)
    plain = torch.optim.AdamW(groups(theirs), lr=RATE, betas=BETAS)
    for optimizer, found in ((eight_bit, ours), (plain, theirs)):
        train(optimizer, found, range(5))
    assert [eight_bit.state[parameter]["state1"].dtype for parameter in ours] == [
        torch.uint8, torch.float32, torch.float32,
    ]  # fmt: skip
    for size, own, other in zip((5000, 100, 8192), ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=RATE if size == 5000 else 1e-6)
        for name in ("exp_avg", "exp_avg_sq"):
            wanted = plain.state[other][name]
            assert (moment(eight_bit, own, name) - wanted).abs().max() <= (
                0.02 if size == 5000 else 1e-6
            ) * wanted.abs().max()


def test_moments_that_were_saved_go_on_as_they_were() -> None:
    whole, cut = parameters(), parameters()
    for_whole, first = (build_eight_bit_adamw(groups(found), lr=RATE, betas=BETAS) for found in (whole, cut))
    train(for_whole, whole, range(6))
    train(first, cut, range(3))
    saved = [{name: moment(first, part, name).clone() for name in ("exp_avg", "exp_avg_sq")} for part in cut]
    codes = first.state[cut[0]]["state1"].clone()
    second = build_eight_bit_adamw(groups(cut), lr=RATE, betas=BETAS)
    for part, moments in zip(cut, saved, strict=True):
        second.state[part]["step"] = torch.zeros(())
        for name, values in moments.items():
            moment(second, part, name).copy_(values)
        count_updates(second, part, 3)
    train(second, cut, range(3, 6))
    for own, other in zip(cut, whole, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
        assert second.state[own]["step"] == 6 and "exp_avg" not in second.state[own]
    assert codes.unique().numel() > 100, "the codes are used"


@pytest.fixture(scope="module")
def mesh() -> Iterator[ParallelMesh]:
    mesh = open_mesh(layout_config(RECIPE, (1, 1, 1), 1, []).parallel)
    yield mesh
    close_mesh(mesh)


def losses(engine: Engine, steps: range) -> list[float]:
    config = layout_config(RECIPE, (1, 1, 1), 1, [])
    batches = (local_batches(RECIPE, config, engine.mesh, step, uneven=False) for step in steps)
    return [engine.train_batch(batch, RECIPE.learning_rate).loss for batch in batches]


def test_a_run_saves_loads_and_goes_on(mesh: ParallelMesh) -> None:
    def built(*flags: str) -> Engine:
        return build_engine(layout_config(RECIPE, (1, 1, 1), 1, list(flags)), mesh)

    plain, whole, resumed = (
        losses(built(), range(RECIPE.steps)),
        built("--use-bnb-optimizer"),
        built("--use-bnb-optimizer"),
    )
    first = losses(whole, range(HALF))
    saved = {(key.name, key.kind): values.clone() for key, values in owned_pieces(whole)}
    rest = losses(whole, range(HALF, RECIPE.steps))
    for key, accept in pieces_to_load(resumed):
        accept(saved[key.name, key.kind])
    refresh_weights(resumed, HALF)
    assert losses(resumed, range(HALF, RECIPE.steps)) == pytest.approx(rest, rel=1e-5)
    assert [*first, *rest] == pytest.approx(plain, rel=2e-2) and rest[-1] < first[0]
    assert not torch.allclose(torch.tensor([*first, *rest]), torch.tensor(plain), rtol=1e-7, atol=0)
    dtypes = {state["state1"].dtype for state in whole.optimizer.state.values()}
    assert dtypes == {torch.uint8, torch.float32}
    from_plain = built()
    for key, accept in pieces_to_load(from_plain):
        accept(saved[key.name, key.kind])
    refresh_weights(from_plain, HALF)
    assert losses(from_plain, range(HALF, RECIPE.steps)) == pytest.approx(rest, rel=2e-2)
