"""How many operations a step runs beyond forward and backward of the network, and how often the host waits."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch

from benchmarks.step_phases import AFTER, PHASES, OperationCounter, StepPhases
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe

SHALLOW, DEEP = 2, 4
# On a CPU the host may look at values, which costs nothing: ids are checked, and labels that do not count left out.
# On a GPU these lines are not reached.
ON_A_CPU_ONLY = ("tensor/layers.py", "tensor/head_loss.py")


class Case(NamedTuple):
    """A way to train, with two micro-batches a step."""

    dtype: str
    zero_stage: int


class Counts(NamedTuple):
    """What a step of one rank ran.

    Attributes:
        after: operations after backward, hooks of the backward pass included.
        waits: how often the host would have waited for a GPU after backward, by operation and place.
        others: the same before and during forward and backward.
    """

    after: int
    waits: dict[str, int]
    others: dict[str, int]


class Ceiling(NamedTuple):
    """The most that a step may run.

    Attributes:
        shallow: operations after backward, with 2 blocks.
        deep: the same with 4.
        waits: times that the host waits after backward.
    """

    shallow: int
    deep: int
    waits: int


# What was measured, only to be lowered; ZeRO-3 last, since it adds operations to all that follows in a process.
CEILINGS = {
    Case("fp32", 0): Ceiling(27, 27, 1),
    Case("fp32", 1): Ceiling(30, 30, 1),
    Case("fp32", 2): Ceiling(30, 30, 1),
    Case("bf16", 1): Ceiling(30, 30, 1),
    Case("bf16", 2): Ceiling(30, 30, 1),
    Case("fp32", 3): Ceiling(1067, 1891, 2),
    Case("bf16", 3): Ceiling(1123, 1995, 2),
}


def step_counts(rank: int, cases: list[Case]) -> dict[tuple[Case, int], Counts]:
    """The counts of the third step, for each case and depth of the network."""
    torch.set_num_threads(1)
    counts = {}
    for case in cases:
        for layers in (SHALLOW, DEEP):
            counts[case, layers] = third_step(case, layers)
    return counts


def third_step(case: Case, layers: int) -> Counts:
    """The counts of one engine: by then everything that is made once has been made."""
    recipe = dataclasses.replace(Recipe(), num_layers=layers, hidden_size=16, global_batch_size=4)
    config = layout_config(recipe, (1, 1, 1), case.zero_stage, ["--bf16"] if case.dtype == "bf16" else [])
    mesh = open_mesh(config.parallel)
    engine, phases = build_engine(config, mesh), StepPhases()
    engine.on_phase = phases.enter
    counter = OperationCounter(phases)
    with phases.following():
        for step in range(3):
            batches = local_batches(recipe, config, mesh, step, False)
            phases.start()
            if step < 2:
                engine.train_batch(batches, recipe.learning_rate)
                continue
            with counter.counting():
                engine.train_batch(batches, recipe.learning_rate)
    others: dict[str, int] = {}
    for phase in PHASES[:-1]:
        others.update(counter.waits_of_phase(phase))
    return Counts(counter.of_phase(AFTER), counter.waits_of_phase(AFTER), others)


@pytest.fixture(scope="module")
def counts() -> dict[tuple[Case, int], Counts]:
    return run_ranks(step_counts, 1, list(CEILINGS))[0]


@pytest.mark.parametrize("case", CEILINGS, ids=lambda case: f"{case.dtype}-zero{case.zero_stage}")
def test_what_follows_backward_stays_below_its_ceiling(case: Case, counts: dict[tuple[Case, int], Counts]) -> None:
    ceiling, shallow, deep = CEILINGS[case], counts[case, SHALLOW], counts[case, DEEP]
    assert shallow.after <= ceiling.shallow and deep.after <= ceiling.deep
    assert sum(deep.waits.values()) <= ceiling.waits, deep.waits


@pytest.mark.parametrize("case", CEILINGS, ids=lambda case: f"{case.dtype}-zero{case.zero_stage}")
def test_nothing_waits_in_forward_and_backward(case: Case, counts: dict[tuple[Case, int], Counts]) -> None:
    others = counts[case, DEEP].others
    assert not [wait for wait in others if not any(name in wait for name in ON_A_CPU_ONLY)]
