"""A NaN of one rank is named with its rank and parameter before ranks sum it, in every layout."""

from __future__ import annotations

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpoint.record import Progress
from megatron.engine.gradients.update_gate import UpdateGate
from megatron.errors import NumericsError
from megatron.objective.base import ObjectiveResult
from megatron.parallel.joining import open_mesh
from megatron.train.callbacks.step_reports import check_numbers
from megatron.train.start_up.engine_opening import build_engine
from tests.engine.engine_runs import BF16, CHUNKS, RECIPE
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches

FLAG = "--check-for-nan-in-loss-and-grad"
MATRIX, NORM, LOSS = "decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.1.input_layernorm.weight", "loss"
EXPERTS = ["--num-experts", "4", "--expert-model-parallel-size", "2"]
DEVICE = "the device decides"
NOTHING = (
    r"No rank had NaN or infinity in its own loss or gradients before they were summed\. The update was not applied"
)
DP, PP = r"rank 1 \(dp 1\)", r"rank {} \(pp {}\)"
IN = " in the gradient of "
# (tp, pp, dp), ZeRO stage, flags, the rank and what of it is spoilt, and what is said
CASES: list[tuple[tuple[int, int, int], int, list[str], int, str, str]] = [
    ((1, 1, 2), 0, [], 1, MATRIX, rf"{DP} has nan{IN}{MATRIX} \(bucket \d of 1\)\. The update"),
    ((1, 1, 2), 1, [], 1, MATRIX, rf"{DP} has nan{IN}{MATRIX} \(bucket \d of \d\)\. The update"),
    ((1, 1, 2), 1, [*BF16, DEVICE], 1, NORM, rf"{DP} has nan{IN}{NORM} \(bucket \d of \d\)\. The update"),
    ((1, 1, 2), 2, BF16, 1, MATRIX, rf"{DP} has nan{IN}{MATRIX} \(bucket \d of \d+\)\. The update"),
    ((1, 1, 2), 1, EXPERTS, 0, "decoder.layers.0.mlp.experts", r"rank 0 \(dp 0\) has nan in .*0\.mlp\.experts"),
    ((1, 1, 2), 0, [], 1, LOSS, rf"{DP} has a loss of inf\. The update"),
    ((1, 1, 2), 3, [], 1, LOSS, rf"{DP} has a loss of inf\. The update"),
    ((1, 1, 2), 3, [], 1, MATRIX, NOTHING),
    ((2, 1, 1), 0, [], 1, NORM, rf"rank 1 \(tp 1\) has nan{IN}{NORM}"),  # a copy that the norm does not count
    ((1, 2, 1), 0, [], 0, MATRIX, rf"{PP.format(0, 0)} has nan{IN}{MATRIX}"),
    ((1, 2, 1), 1, [*CHUNKS, *BF16], 1, NORM, rf"{PP.format(1, 1)} has nan{IN}{NORM}"),
    ((1, 2, 1), 1, ["--pipeline-engine", "deepspeed"], 1, NORM, rf"{PP.format(1, 1)} has nan{IN}{NORM}"),
    ((1, 2, 1), 0, [], 1, LOSS, rf"{PP.format(1, 1)} has a loss of inf\. The update"),
]


def spoilt_step(rank: int) -> list[str]:
    """What a run says of a step of each case, in which one rank has a gradient or a loss that is not finite."""
    said = []
    for layout, stage, flags, spoilt, name, _ in CASES:
        extra = [FLAG, *(each for each in flags if each != DEVICE)]
        config = layout_config(RECIPE, layout, stage, extra)
        engine = build_engine(config, open_mesh(config.parallel))
        if DEVICE in flags:  # as on a GPU
            engine.gate = UpdateGate(engine.mesh, spike_deviations=None, allows_overflow=False, on_device=True)
            engine.view.guard(engine.gate)
        batches = [local_batches(RECIPE, config, engine.mesh, step, False) for step in (0, 1)]
        good = engine.train_batch(batches[0], 1e-3)
        restore = _spoil(engine, name) if rank == spoilt else lambda: None
        result = engine.train_batch(batches[1], 1e-3)
        restore()
        run: Any = SimpleNamespace(config=config, engine=engine, mesh=engine.mesh)
        check_numbers(run, Progress(1, 16, 160), good)
        with pytest.raises(NumericsError) as caught:
            check_numbers(run, Progress(2, 32, 320), result)
        said.append(str(caught.value))
    return said


def _spoil(engine: Any, name: str) -> Any:
    if name != LOSS:
        chosen = [each for each in engine.parameters() if each.global_name.startswith(name)]
        return chosen[0].register_hook(lambda gradient: torch.full_like(gradient, math.nan)).remove
    own, calls = type(engine.objective).__call__, []

    def infinite(objective: Any, *given: Any) -> ObjectiveResult:
        result: ObjectiveResult = own(objective, *given)
        calls.append(1)
        return dataclasses.replace(result, loss_sum=result.loss_sum + math.inf) if len(calls) == 2 else result

    type(engine.objective).__call__ = infinite
    return lambda: setattr(type(engine.objective), "__call__", own)


@pytest.mark.slow
def test_the_rank_and_the_parameter_are_named() -> None:
    ranks = run_ranks(spoilt_step, 2)
    assert ranks[0] == ranks[1]
    for (layout, stage, flags, _, _, sentence), said in zip(CASES, ranks[0], strict=True):
        assert re.search(sentence, said), (layout, stage, flags, said)
