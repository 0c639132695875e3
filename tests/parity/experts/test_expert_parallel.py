"""Experts on other ranks train as in one process, with every other axis, and continue on any number of ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron.checkpoint import load, read_tensors, save
from megatron.config import Machine, RunConfig, TokenizerFacts, parse, resolve
from megatron.engine.engine import Engine
from megatron.engine.replicas import find_differences
from megatron.engine.state import owned_pieces, pieces_to_load, refresh_weights
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine, parameter_counts
from tests.helpers.campaign_cases import mark_campaign
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_flags, local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=4, steps=2, hidden_size=16, heads=2, learning_rate=2.0e-3)
RANKS, SAVED_AFTER = 4, 1
NETWORK = (
    "--num-experts 4 --moe-router-topk 2 --moe-layer-pattern 1 0 --moe-ffn-hidden-size 8 --gated-linear-unit "
    "--activation-function silu --moe-shared-expert-intermediate-size 12 --moe-aux-loss-coeff 0.5 "
    "--moe-mlp-bias --moe-router-bias --moe-z-loss-coeff 0.1 --hidden-dropout 0.1 --pad-vocab-size-to 160"
)
TP, PP, CP = "--tensor-model-parallel-size 2 ", "--pipeline-model-parallel-size 2 ", "--context-parallel-size 2 "
SP, WHOLE = "--sequence-parallel ", "--expert-tensor-parallel-size 1 "
RECOMPUTE = "--checkpoint-activations "


class Case(NamedTuple):
    """A layout of four ranks, and flags of the network that it is compared with."""

    experts: int
    zero_stage: int
    flags: str = ""
    network: str = ""

    def config(self, world_size: int = RANKS) -> RunConfig:
        """The resolved configuration; one process has no layout."""
        network = [*NETWORK.split(), *self.network.split()]
        words = f"--expert-model-parallel-size {self.experts} {self.flags}".split() if world_size > 1 else []
        flags = layout_flags(RECIPE, (1, 1, 1), self.zero_stage if world_size > 1 else 0, [*network, *words])
        machine = Machine(device_type="cpu", world_size=world_size, supports_fp16=False, supports_bf16=True)
        return resolve(parse(flags), machine, TokenizerFacts(RECIPE.vocab_size, 0, "none"))


# Every pair of expert size, ZeRO stage and axis is somewhere in it; a stage of the interleaved one has no experts.
FEW = [
    Case(2, 1, RECOMPUTE),
    Case(4, 0),
    Case(2, 3, TP + SP + RECOMPUTE),
    Case(4, 2, CP),
    Case(4, 3),
    Case(2, 0, TP),
    Case(2, 2, TP + SP + WHOLE + RECOMPUTE),
    Case(4, 1, TP + SP + WHOLE),
    Case(2, 1, PP + "--pipeline-schedule interleaved-zb"),
    Case(2, 2, PP + CP + "--pipeline-schedule zbv " + RECOMPUTE),
    Case(2, 1, TP + PP + SP + WHOLE),
]
_SCHEDULES = ("1f1b", "interleaved", "zb-h1", "interleaved-zb", "zbv", "v-half", "v-1f1b")
_PIPELINES = [f"{PP}--pipeline-schedule {name} " for name in _SCHEDULES]
_PIPELINES.append(f"{PP}--pipeline-engine deepspeed ")
ALL = [
    *(Case(size, stage, flags) for size, stage, flags in itertools.product((2, 4), range(4), ("", RECOMPUTE, CP))),
    *(Case(2, stage, TP + flags) for stage, flags in itertools.product(range(4), ("", SP, SP + RECOMPUTE, SP + WHOLE))),
    *(Case(size, stage, TP + SP + WHOLE + RECOMPUTE) for size, stage in itertools.product((1, 4), range(4))),
    *(Case(2, stage, flags) for flags, stage in itertools.product(_PIPELINES, (0, 1))),
    *(Case(2, 2, flags) for flags in _PIPELINES[:-1]),
]

# Of eight ranks: three axes at once, and four ranks of experts beside another axis.
EIGHT = [
    *(Case(2, stage, TP + PP + flags) for stage, flags in itertools.product(range(3), ("", SP + RECOMPUTE))),
    *(Case(4, stage, TP + flags) for stage, flags in itertools.product(range(4), ("", SP))),
    *(Case(4, stage, PP + flags) for stage, flags in itertools.product(range(3), ("", RECOMPUTE))),
]

Curve = list[float]


def steps(engine: Engine, config: RunConfig, first: int, last: int) -> Curve:
    """Losses and norms of the steps from `first` until `last`."""
    curve = []
    for step in range(first, last):
        result = engine.train_batch(local_batches(RECIPE, config, engine.mesh, step, True), RECIPE.learning_rate)
        assert result.loss is not None
        curve += [result.loss, float(result.gradient_norm)]
    return curve


def train(rank: int, cases: Sequence[Case], world_size: int) -> list[tuple[Curve, tuple[float, float], int, list[str]]]:
    """Losses and norms of each case, an evaluation, the size of the network, and what differs between copies."""
    found = []
    for case in cases:
        config = case.config(world_size)
        engine = build_engine(config, open_mesh(config.parallel))
        curve = steps(engine, config, 0, RECIPE.steps)
        evaluated = engine.evaluate(local_batches(RECIPE, config, engine.mesh, 9, True))
        found.append((curve, evaluated, parameter_counts(engine)[0], find_differences(engine)))
    return found


SETS = {"few": (RANKS, FEW), "all": (RANKS, ALL), "eight ranks": (2 * RANKS, EIGHT)}


@pytest.mark.full
@pytest.mark.parametrize("name", mark_campaign(SETS, ["few"]))
def test_experts_on_other_ranks_train_like_one_process(name: str) -> None:
    ranks, cases = SETS[name]
    ((curve, evaluated, size, _),) = run_ranks(train, 1, [Case(1, 0)], 1)[0]
    for of_rank in run_ranks(train, ranks, cases, ranks, timeout_seconds=60 + 5 * ranks * len(cases)):
        for case, (losses, other, parameters, differences) in zip(cases, of_rank, strict=True):
            assert losses == pytest.approx(curve, rel=1e-6), case
            assert other == pytest.approx(evaluated, rel=1e-6), case
            assert (parameters, differences) == (size, []), case


# What the ranks decide together: who is dropped, by which bias or loss experts are balanced; and half precision.
OTHERS = [
    Case(2, 1, RECOMPUTE, "--moe-expert-capacity-factor 1.0"),
    Case(4, 2, TP + SP + WHOLE, "--moe-expert-capacity-factor 0.75 --moe-token-drop-policy position"),
    Case(
        4, 0, CP, "--moe-expert-capacity-factor 1.0 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    ),
    Case(2, 3, TP, "--moe-aux-loss-scope global --moe-router-num-groups 2 --moe-router-group-topk 1"),
    Case(2, 1, "", "--bf16"),
]


@pytest.mark.full
def test_other_routing_is_that_of_one_process() -> None:
    alone = run_ranks(train, 1, OTHERS, 1)[0]
    for of_rank in run_ranks(train, RANKS, OTHERS, RANKS, timeout_seconds=200):
        for case, (curve, evaluated, *_), (losses, other, _, differences) in zip(OTHERS, alone, of_rank, strict=True):
            close = 2e-2 if "--bf16" in case.network else 1e-6
            assert losses == pytest.approx(curve, rel=close), case
            assert other == pytest.approx(evaluated, rel=close) and not differences, case


SAVED, CONTINUED = Case(2, 1), [Case(4, 3), Case(2, 2, TP + SP + WHOLE), Case(1, 0), Case(4, 1), Case(1, 2, PP)]


def save_and_continue(rank: int, folder: str) -> list[Curve]:
    """Trains, saves, and continues in other layouts, each of which saves again what it has loaded for the next one."""
    config = SAVED.config()
    engine = build_engine(config, open_mesh(config.parallel))
    steps(engine, config, 0, SAVED_AFTER)
    last = Path(folder) / "saved"
    save(last, SAVED_AFTER, owned_pieces(engine), {"updates": engine.update_count}, engine.mesh)
    curves = [steps(engine, config, SAVED_AFTER, RECIPE.steps)]
    for number, case in enumerate(CONTINUED):
        config = case.config()
        engine = build_engine(config, open_mesh(config.parallel))
        record = load(last / f"iter_{SAVED_AFTER:07d}", pieces_to_load(engine), engine.mesh)
        refresh_weights(engine, record["updates"])
        last = Path(folder) / str(number)
        save(last, SAVED_AFTER, owned_pieces(engine), {"updates": record["updates"]}, engine.mesh)
        curves.append(steps(engine, config, SAVED_AFTER, RECIPE.steps))
    return curves


@pytest.mark.full
def test_a_checkpoint_loads_to_the_bit_on_any_number_of_expert_ranks(tmp_path: Path) -> None:
    for curves in run_ranks(save_and_continue, RANKS, str(tmp_path), timeout_seconds=200):
        for curve in curves[1:]:
            assert curve == pytest.approx(curves[0], rel=1e-6)
    step = f"iter_{SAVED_AFTER:07d}"
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        expected = dict(read_tensors(tmp_path / "saved" / step, kind=kind))  # type: ignore[arg-type]
        assert any(".experts." in name for name in expected)
        for number in range(len(CONTINUED)):
            found = dict(read_tensors(tmp_path / str(number) / step, kind=kind))  # type: ignore[arg-type]
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items())
