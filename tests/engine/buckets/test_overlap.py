"""Messages of data-parallel ranks start while passes run, in buckets, and change no number."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.engine.buckets import averaging
from megatron.engine.engine import Engine
from megatron.parallel import messages
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.tensor import weight_gradients
from megatron.train.start_up.engine_opening import build_engine
from tests.engine.engine_runs import BF16, CHUNKS, train
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=8, steps=3, hidden_size=16)
SMALL = ["--ddp-bucket-size", "2000"]
Start = Callable[..., Any]
# tp, pp, dp; ZeRO stage; flags
RUNS: dict[str, tuple[tuple[int, int, int], int, list[str]]] = {
    "ZeRO 0": ((1, 1, 2), 0, []),
    "ZeRO 1": ((1, 1, 2), 1, BF16),
    "ZeRO 1, sums of exchanged parts": ((1, 1, 2), 1, [*BF16, "--ddp-reduce-scatter-with-fp32-accumulation"]),
    "ZeRO 2": ((1, 1, 2), 2, BF16),
    "ZeRO 1, 4 ranks": ((1, 1, 4), 1, []),
    "ZeRO 1, stages": ((1, 2, 2), 1, []),
    "ZeRO 1, chunks": ((1, 2, 2), 1, ["--pipeline-schedule", "interleaved"]),
    "ZeRO 2, split backward": ((1, 2, 2), 2, [*CHUNKS[:2], *BF16]),
    "ZeRO 1, split tokens": ((2, 1, 2), 1, ["--sequence-parallel"]),
}


@dataclasses.dataclass
class Observed:
    """What one rank did in the last of its steps, and where all of them led.

    Attributes:
        early: share of the bytes of gradients sent before the last gradient was computed.
        waiting: weights' buckets in transit when each layer of the next forward pass began.
        weights: after the last step.
    """

    early: float
    waiting: list[int]
    norms: list[float]
    weights: list[torch.Tensor]


def observe(rank: int, layout: tuple[int, int, int], stage: int, flags: list[str]) -> list[Observed]:
    """Trains with small buckets, the same without overlap, and with one bucket of each kind without overlap.

    In float32, products add weight gradients to the sums: autograd calls hooks without a gradient, too.
    """
    weight_gradients.FEWEST_ADDED_CPU = 1
    mesh = open_mesh(layout_config(RECIPE, layout, stage, flags).parallel)
    blocking = "--no-overlap-grad-reduce"
    return [observe_run([*flags, *more], layout, stage, mesh) for more in (SMALL, [*SMALL, blocking], [blocking])]


def observe_run(flags: list[str], layout: tuple[int, int, int], stage: int, mesh: ParallelMesh) -> Observed:
    """Trains some steps and records when messages start."""
    config = layout_config(RECIPE, layout, stage, flags)
    engine = build_engine(config, mesh)
    events: list[tuple[str, int]] = []

    def recorded(start: Start) -> Start:
        def start_recorded(tensor: torch.Tensor, *given: Any) -> Any:
            events.append(("message", tensor.numel()))
            return start(tensor, *given)

        return start_recorded

    for name in ("start_reduce_scatter_sum", "start_all_reduce_sum", "start_exchange"):
        setattr(averaging, name, recorded(getattr(messages, name)))
    for parameter in engine.parameters():
        parameter.register_hook(lambda _: events.append(("gradient", 0)))
    waiting, norms = [], []
    for step in range(RECIPE.steps):
        events.clear()
        waiting = watch_layers(engine)
        train(engine, config, step, step + 1, RECIPE)
        norms.append(float(engine.view.norm()))
    last = max(index for index, (kind, _) in enumerate(events) if kind == "gradient")
    sizes = [(index < last, size) for index, (kind, size) in enumerate(events) if kind == "message"]
    early = sum(size for is_early, size in sizes if is_early) / sum(size for _, size in sizes)
    return Observed(early, waiting, norms, [parameter.detach().clone() for parameter in engine.parameters()])


def watch_layers(engine: Engine) -> list[int]:
    """The buckets in transit at each layer of the coming step."""
    counts: list[int] = []
    gathers = getattr(engine.view, "_gathers", None)

    def before_layer(parameters: Any) -> None:
        engine.view.await_weights(parameters)
        counts.append(0 if gathers is None else len(gathers._pending))

    engine.stack.before_layer = before_layer
    return counts


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("layout", "stage", "flags"), RUNS.values(), ids=RUNS)
def test_most_gradients_are_sent_before_the_last_one_exists(
    layout: tuple[int, int, int], stage: int, flags: list[str]
) -> None:
    size = layout[0] * layout[1] * layout[2]
    for ours, plain, one in run_ranks(observe, size, layout, stage, flags):
        assert ours.norms == plain.norms and all(map(torch.equal, ours.weights, plain.weights))
        assert ours.norms == pytest.approx(one.norms, rel=1e-6)
        assert ours.early >= (0.5 if "interleaved-zb" in flags else 0.8)  # deferred gradients are sent chunk by chunk
        assert stage == 2 or plain.early == 0
        if stage:
            assert ours.waiting[0] > 1 and ours.waiting == sorted(ours.waiting, reverse=True)
            assert set(plain.waiting) == {0}


def trained_engine(stage: int, flags: list[str]) -> weakref.ref[Engine]:
    """An engine that trained one step, without another reference to it."""
    config = layout_config(RECIPE, (1, 1, 2), stage, flags)
    engine = build_engine(config, open_mesh(config.parallel))
    train(engine, config, 0, 1, RECIPE)
    return weakref.ref(engine)


def remaining(rank: int, cases: list[tuple[int, list[str]]]) -> list[tuple[int, list[str]]]:
    """The cases whose engines are still in memory after the garbage was collected."""
    engines = [trained_engine(*case) for case in cases]
    gc.collect()
    return [case for case, engine in zip(cases, engines, strict=True) if engine() is not None]


def test_hooks_of_gradients_do_not_keep_an_engine_in_memory(tmp_path: Path) -> None:
    settings = tmp_path / "deepspeed.json"
    settings.write_text('{"bf16": {"immediate_grad_update": true}}')
    cases = [(0, []), (1, BF16), (2, BF16), (1, [*BF16, "--deepspeed_config", str(settings)])]
    assert run_ranks(remaining, 2, cases) == [[], []]
