"""Overlapping the sums of input gradients changes no loss, and sends the same messages."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch.distributed as dist

from megatron.parallel.joining import open_mesh
from megatron.parallel.tensor import weight_gradients
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe
from tests.parity.switches import SWITCHES

pytestmark = pytest.mark.slow
RECIPE = dataclasses.replace(Recipe(), num_layers=2, steps=2, learning_rate=2.0e-3)
REPLICAS, STAGES = (2, 1, 2), (2, 2, 1)  # tp, pp, dp
CASES = {
    "tied weights, products added to sums": (REPLICAS, []),
    "experts, bf16": (REPLICAS, ["--bf16", *SWITCHES["sigmoid and shared experts"]]),
    "latents, recomputed": (REPLICAS, ["--checkpoint-activations", *SWITCHES["latents"]]),
    "fp8, frozen": (REPLICAS, ["--bf16", "--fp8-format", "hybrid", "--fp8-emulation", "--freeze", "*linear_fc1*"]),
    "split backward": (STAGES, ["--pipeline-schedule", "zb-h1", *SWITCHES["llama"]]),
    "split backward, replicated keys": (STAGES, ["--bf16", "--pipeline-schedule", "zb-h1", *SWITCHES["multi-query"]]),
}
Run = tuple[list[tuple[float | None, float | None]], list[tuple[int, bool]]]


def train(layout: tuple[int, int, int], flags: list[str]) -> Run:
    """Losses and gradient norms, and the bytes of each all-reduce with True if it is asynchronous."""
    config = layout_config(RECIPE, layout, 1, flags)
    mesh = open_mesh(config.parallel)
    curve, sums, all_reduce = [], [], dist.all_reduce

    def recording(tensor: Any, *arguments: Any, **options: Any) -> Any:
        sums.append((tensor.nbytes, bool(options.get("async_op"))))
        return all_reduce(tensor, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", recording)
        patch.setattr(weight_gradients, "FEWEST_ADDED_CPU", 1)
        engine = build_engine(config, mesh)
        sums.clear()
        for step in range(RECIPE.steps):
            result = engine.train_batch(local_batches(RECIPE, config, mesh, step, True), RECIPE.learning_rate)
            curve.append((result.loss, result.gradient_norm))
    return curve, sums


def train_all(rank: int) -> dict[str, list[Run]]:
    """Each case with overlap and without."""
    others = ([], ["--no-async-tensor-model-parallel-allreduce"])
    return {name: [train(layout, [*flags, *other]) for other in others] for name, (layout, flags) in CASES.items()}


@pytest.mark.full
def test_losses_and_messages_are_the_same_without_overlap() -> None:
    for rank, runs in enumerate(run_ranks(train_all, 4)):
        for name, ((curve, sums), (blocking_curve, blocking_sums)) in runs.items():
            assert curve == blocking_curve, f"{name}, rank {rank}"
            assert sorted(size for size, _ in sums) == sorted(size for size, _ in blocking_sums), name
            overlapping, others = (sum(is_async for _, is_async in each) for each in (sums, blocking_sums))
            assert overlapping >= others + RECIPE.steps * 2, name
