"""Every optimizer trains alike in every layout, and goes on from a checkpoint of another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import load, read_tensors, save
from megatron.config import RunConfig
from megatron.engine.engine import Engine
from megatron.engine.optimizers import whole_matrices
from megatron.engine.state import owned_pieces, pieces_to_load, refresh_weights
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import exchange_parts
from megatron.parallel.pieces import Kind
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.campaign_cases import mark_campaign
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe
from trident.plan.dry_run.rank_simulation import simulate_rank

pytestmark = pytest.mark.slow
RECIPE = dataclasses.replace(Recipe(), num_layers=2, hidden_size=16, steps=4, learning_rate=1.0e-2)
SAVED_AFTER = 2
# Without a bias of the keys: its gradient is rounding alone, of which Lion would take the sign.
FLAGS = [
    *("--group-query-attention", "--num-query-groups", "2", "--no-add-qkv-bias"),
    *("--gated-linear-unit", "--activation-function", "silu"),
]
OPTIMIZERS = {
    "muon": ["--optimizer", "muon"],
    "lion": ["--optimizer", "lion", "--ema-decay", "0.9"],
    "sgd": ["--optimizer", "sgd"],
    "schedule-free": ["--optimizer", "schedule-free", "--lr-decay-style", "constant"],
    "muon-experts": [
        *("--optimizer", "muon", "--num-experts", "4"),
        *("--moe-router-topk", "2", "--expert-model-parallel-size", "2"),
    ],
}
Axes = list[tuple[int, ...]]
Curve = list[tuple[float, float]]
# (tp, pp, dp) and the ZeRO stages; the last one saves
LAYOUTS = {
    "tp2dp2": ((2, 1, 2), [0, 2, 1]),
    "pp2dp2": ((1, 2, 2), [2, 1]),
    "tp2pp2": ((2, 2, 1), [0, 1]),
    "dp4": ((1, 1, 4), [0, 1, 2]),
    "dp2": ((1, 1, 2), [3]),
}


def train(engine: Engine, config: RunConfig, first: int, last: int) -> Curve:
    """Loss and norm of the steps [first, last)."""
    results = [
        engine.train_batch(local_batches(RECIPE, config, engine.mesh, step, uneven=True), RECIPE.learning_rate)
        for step in range(first, last)
    ]
    return [(result.loss, result.gradient_norm) for result in results]


def train_and_save(
    rank: int, layout: tuple[int, int, int], stages: list[int], extra: list[str], folder: str
) -> dict[int, Curve]:
    """Trains with every ZeRO stage, and saves with the last."""
    curves = {}
    for stage in stages:
        config = layout_config(RECIPE, layout, stage, [*FLAGS, *extra])
        engine = build_engine(config, open_mesh(config.parallel))
        curves[stage] = train(engine, config, 0, SAVED_AFTER)
        if stage == stages[-1]:
            with engine.using_averages():  # changes nothing
                engine.evaluate(local_batches(RECIPE, config, engine.mesh, 0, uneven=True))
            record = {"updates": engine.update_count, "weight": engine.averaging_weight}
            save(Path(folder), SAVED_AFTER, owned_pieces(engine), record, engine.mesh)
        curves[stage] += train(engine, config, SAVED_AFTER, RECIPE.steps)
    return curves


def load_and_train(rank: int, layout: tuple[int, int, int], stage: int, extra: list[str], folder: str) -> Curve:
    """Loads what any layout saved, and trains the rest."""
    config = layout_config(RECIPE, layout, stage, [*FLAGS, *extra])
    engine = build_engine(config, open_mesh(config.parallel))
    record = load(Path(folder) / f"iter_{SAVED_AFTER:07d}", pieces_to_load(engine), engine.mesh)
    refresh_weights(engine, record["updates"], averaging_weight=record["weight"])
    return train(engine, config, SAVED_AFTER, RECIPE.steps)


def alone(optimizer: str) -> list[str]:
    """The flags for one process."""
    return [*OPTIMIZERS[optimizer], "--expert-model-parallel-size", "1"]


def check_curve(found: Curve, expected: Curve, largest_ratio: float) -> None:
    assert len(found) == len(expected)
    for pair, known in zip(found, expected, strict=True):
        assert pair == pytest.approx(known, rel=largest_ratio)


def check_stored(found: Path, expected: Path, kind: Kind, *, is_momentum: bool) -> None:
    """Both checkpoints hold the same tensors of a kind: momenta up to a part in 10^5 of the largest in the tensor, and
    what has Adam's quotients of tiny gradients in it, as weights do, up to a thousandth of the learning rate.
    """
    step = f"iter_{SAVED_AFTER:07d}"
    known = dict(read_tensors(expected / step, kind=kind))
    stored = dict(read_tensors(found / step, kind=kind))
    assert stored.keys() == known.keys()
    for name, tensor in stored.items():
        scale = known[name].abs().max() if is_momentum else 100 * RECIPE.learning_rate
        assert (tensor - known[name]).abs().max() <= 1.0e-5 * scale, (kind, name)


CASES = [
    f"{optimizer} {layout}"
    for optimizer in OPTIMIZERS
    for layout in LAYOUTS
    if (layout != "dp2" or "muon" not in optimizer) and ("experts" not in optimizer or "dp" in layout)
]
KEPT = ["muon tp2dp2", "muon pp2dp2", "muon-experts tp2dp2", "lion pp2dp2", "schedule-free tp2dp2", "schedule-free dp2"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", mark_campaign(CASES, KEPT), ids=str)
def test_every_layout_trains_like_one_process(case: str, tmp_path: Path) -> None:
    optimizer, layout = case.split()
    extra, (sizes, stages) = OPTIMIZERS[optimizer], LAYOUTS[layout]
    plain = run_ranks(train_and_save, 1, (1, 1, 1), [0], alone(optimizer), str(tmp_path / "plain"))[0][0]
    ranks, largest_ratio = sizes[0] * sizes[1] * sizes[2], 1.0e-6 if optimizer == "schedule-free" else 1.0e-5
    for curves in run_ranks(train_and_save, ranks, sizes, stages, extra, str(tmp_path / layout)):
        for curve in curves.values():
            check_curve(curve, plain, largest_ratio)
    has_means = "--ema-decay" in extra or optimizer == "schedule-free"
    for kind in ("weight", "exp_avg", *(["average"] if has_means else [])):
        is_momentum = kind == "exp_avg" and optimizer != "schedule-free"
        check_stored(tmp_path / layout, tmp_path / "plain", kind, is_momentum=is_momentum)
    resumed = run_ranks(load_and_train, 1, (1, 1, 1), 0, alone(optimizer), str(tmp_path / layout))[0]
    check_curve(resumed, plain[SAVED_AFTER:], largest_ratio)


def exchanges_of_matrices(rank: int, config: RunConfig) -> Axes:
    """The ranks of every exchange of Muon's matrices in a step."""
    engine, found = build_engine(config, open_mesh(config.parallel)), []

    def exchange(parts: Sequence[torch.Tensor], sizes: Sequence[int], axis: Axis) -> list[torch.Tensor]:
        found.extend([axis.ranks] if axis.size > 1 else [])
        return exchange_parts(parts, sizes, axis)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_matrices, "exchange_parts", exchange)
        train(engine, config, 0, 1)
    return found


def test_a_dry_run_exchanges_the_matrices_of_a_step() -> None:
    """Those of experts, which are a group of the optimizer, are whole on each rank here."""
    config = layout_config(RECIPE, (1, 1, 2), 1, [*FLAGS, *OPTIMIZERS["muon-experts"]])
    for rank, found in enumerate(run_ranks(exchanges_of_matrices, 2, config)):
        program, *_ = simulate_rank(config, rank, 2, [RECIPE.global_batch_size])
        simulated = [event.message.ranks for event in program.events if event.part == "matrices"]
        assert found == simulated == [(0, 1)] * 2
