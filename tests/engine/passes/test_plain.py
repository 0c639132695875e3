"""The passes of one process: what DeepSpeed's engine is asked, in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron.engine.micro_batch import DeviceBatch
from megatron.engine.passes.plain import PlainPasses
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import StepSettings

BATCH = DeviceBatch((torch.ones(1, 2),), (torch.zeros(1, dtype=torch.int64),), (1, 2), 0, (), ())


class RecordingEngine:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __call__(self, inputs: torch.Tensor, context: Any) -> torch.Tensor:
        self.asked.append(("forward", torch.is_grad_enabled()))
        return inputs

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.asked.append((name, *given) if name.startswith("set_") else (name,))


def test_only_the_last_micro_batch_ends_the_step() -> None:
    engine, phases = RecordingEngine(), []
    context = BATCH.context(StepSettings(), 1.0)
    losses: Any = SimpleNamespace(
        context_of=lambda batch: context, of=lambda outputs, targets, auxiliary: outputs.sum()
    )
    passes = PlainPasses(engine, LayerStack([]), None, phases.append)  # type: ignore[arg-type]
    passes.train([BATCH, BATCH], losses)
    boundary, last = ("set_gradient_accumulation_boundary", False), ("set_gradient_accumulation_boundary", True)
    steps = [("forward", True), ("backward",), ("step",)]
    assert engine.asked == [boundary, *steps, last, *steps]
    assert phases == ["forward", "backward", "step"] * 2
    engine.asked.clear()
    passes.evaluate([BATCH], losses)
    assert engine.asked == [("forward", False)]
