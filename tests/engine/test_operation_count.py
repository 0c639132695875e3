"""How many operations a step runs beyond forward and backward of the network, and how often the host waits."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.step_phases import AFTER, BACKWARD, BEFORE, FORWARD, TRANSFER, OperationCounter, StepPhases
from megatron.engine.gradients.update_gate import UpdateGate
from megatron.parallel.joining import open_mesh
from megatron.parallel.tensor import weight_gradients
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe

pytestmark = pytest.mark.full

SHALLOW, DEEP = 2, 4
# On a CPU the host may look at values, which costs nothing: ids are checked, and labels that do not count left out.
# On a GPU these functions are not reached.
ON_A_CPU_ONLY = {
    "_local_scalar_dense at tensor/layers.py:<genexpr>",
    "nonzero at tensor/head_loss.py:of",
    "_local_scalar_dense at tensor/head_loss.py:backward",
}
# Where the host reads what all ranks have agreed on: before the update, or a step later.
ON_THE_HOST = {"tolist at gradients/update_gate.py:_agreed_on_host": 1}
ON_THE_DEVICE = {"tolist at gradients/update_gate.py:settle": 1}
BY_DEEPSPEED = {  # ZeRO-3
    "tolist at gradients/update_gate.py:_agreed_on_host": 1,
    "_local_scalar_dense at runtime/utils.py:is_invalid_grad_norm": 1,
}


class Case(NamedTuple):
    """A way to train; `layout` is (tp, pp, dp), and with `decides_on_device` the update is decided as on a GPU."""

    dtype: str
    zero_stage: int
    layout: tuple[int, int, int] = (1, 1, 1)
    flags: tuple[str, ...] = ()
    decides_on_device: bool = False
    adds_products: bool = False


class Counts(NamedTuple):
    """Counts of a step of one rank."""

    after: int  # operations after backward, hooks of the backward pass included
    waits: dict[str, int]  # of the host for a GPU after backward, by operation and function
    others: dict[str, int]  # the same before and during forward and backward, and between stages
    walks: int  # searches of the network for its modules and parameters


DEVICE = functools.partial(Case, decides_on_device=True)
FUSED = functools.partial(Case, adds_products=True)
REPLICAS, SPLIT, STAGES = (1, 1, 2), (2, 1, 1), (1, 2, 1)
# Operations after backward, however many blocks there are, as measured: only to be lowered. Each of the two groups of
# parameters that data-parallel ranks divide is sent, gathered, and added for each micro-batch at ZeRO-2.
ONE_RANK = {
    Case("fp32", 0): 19,
    Case("fp32", 1): 21,
    Case("fp32", 2): 21,
    Case("bf16", 1): 22,
    Case("bf16", 2): 22,
    DEVICE("fp32", 0): 29,
    DEVICE("bf16", 1): 32,
    FUSED("fp32", 0): 19,
    FUSED("fp32", 1): 21,
}
TWO_RANKS = {
    Case("fp32", 0, REPLICAS): 28,
    DEVICE("bf16", 1, REPLICAS): 52,
    Case("bf16", 2, REPLICAS): 61,
    Case("bf16", 2, SPLIT, ("--sequence-parallel",)): 35,  # partial gradients have a bucket of their own
    DEVICE("bf16", 1, STAGES): 39,
    Case("fp32", 0, STAGES, ("--pipeline-engine", "deepspeed")): 38,
}
# With 2 and with 4 blocks, since it is DeepSpeed that adds gradients up; it adds to the operations of what follows in a
# process.
ZERO_3 = {Case("fp32", 3): (1048, 1872), Case("bf16", 3): (1104, 1976)}
CASES = [*ONE_RANK, *TWO_RANKS, *ZERO_3]


def name_of(case: Case) -> str:
    sizes = [f"{axis}{size}" for axis, size in zip(("tp", "pp", "dp"), case.layout, strict=True) if size > 1]
    flags = [flag.removeprefix("--") for flag in (*case.flags[-1:], *(["device"] if case.decides_on_device else []))]
    flags += ["fused"] if case.adds_products else []
    return "-".join([f"{case.dtype}-zero{case.zero_stage}", *sizes, *flags])


def step_counts(rank: int, cases: list[Case]) -> dict[tuple[Case, int], Counts]:
    torch.set_num_threads(1)
    return {(case, layers): third_step(case, layers) for case in cases for layers in (SHALLOW, DEEP)}


def third_step(case: Case, layers: int) -> Counts:
    """The counts of one engine: by then everything that is made once has been made."""
    batch = 2 * Recipe().micro_batch_size * case.layout[2]  # two micro-batches a step
    recipe = dataclasses.replace(Recipe(), num_layers=layers, hidden_size=16, global_batch_size=batch)
    flags = [*(["--bf16"] if case.dtype == "bf16" else []), *case.flags]
    config = layout_config(recipe, case.layout, case.zero_stage, flags)
    mesh = open_mesh(config.parallel)
    with mock.patch.object(weight_gradients, "FEWEST_ADDED_CPU", 1 if case.adds_products else 1 << 62):
        engine, phases = build_engine(config, mesh), StepPhases()
    if case.decides_on_device:
        engine.gate = UpdateGate(mesh, spike_deviations=None, allows_overflow=False, on_device=True)
        engine.view.guard(engine.gate)
    engine.on_phase = phases.enter
    counter = OperationCounter(phases)
    with phases.following():
        for step in range(3):
            batches = local_batches(recipe, config, mesh, step, False)
            phases.start()
            if step < 2:
                engine.train_batch(batches, recipe.learning_rate)
                continue
            with counter.counting(), mock.patch.object(nn.Module, "named_modules", autospec=True) as walked:
                engine.train_batch(batches, recipe.learning_rate)
    others: dict[str, int] = {}
    for phase in (BEFORE, FORWARD, BACKWARD, TRANSFER):
        others.update(counter.waits_of_phase(phase))
    walks = sum(call.args[0] is engine.module for call in walked.call_args_list)  # engines of other cases may be freed
    return Counts(counter.of_phase(AFTER), counter.waits_of_phase(AFTER), others, walks)


@pytest.fixture(scope="module")
def counts() -> list[dict[tuple[Case, int], Counts]]:
    (alone,) = run_ranks(step_counts, 1, [*ONE_RANK, *ZERO_3])
    return [{**alone, **rank} for rank in run_ranks(step_counts, 2, list(TWO_RANKS))]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_what_follows_backward_stays_below_its_ceiling(
    case: Case, counts: list[dict[tuple[Case, int], Counts]]
) -> None:
    for rank in counts:
        shallow, deep = rank[case, SHALLOW].after, rank[case, DEEP].after
        if case in ZERO_3:
            assert shallow <= ZERO_3[case][0] and deep <= ZERO_3[case][1]
        else:
            assert shallow == deep <= {**ONE_RANK, **TWO_RANKS}[case]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_host_waits_for_the_decision_alone(case: Case, counts: list[dict[tuple[Case, int], Counts]]) -> None:
    expected = BY_DEEPSPEED if case in ZERO_3 else ON_THE_DEVICE if case.decides_on_device else ON_THE_HOST
    for rank in counts:
        assert rank[case, DEEP].waits == expected
        assert set(rank[case, DEEP].others) <= ON_A_CPU_ONLY


@pytest.mark.parametrize("case", [*ONE_RANK, *TWO_RANKS], ids=name_of)
def test_no_step_searches_the_network(case: Case, counts: list[dict[tuple[Case, int], Counts]]) -> None:
    assert [rank[case, DEEP].walks for rank in counts] == [0, 0]
