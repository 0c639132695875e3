"""The passes of one process: what DeepSpeed's engine is asked, in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron.engine.micro_batch import DeviceBatch
from megatron.engine.passes.plain import PlainPasses, ShardedPasses
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


def losses_of(engine: RecordingEngine) -> Any:
    """The loss is the sum of the outputs."""
    context = BATCH.context(StepSettings(), 1.0)
    return SimpleNamespace(
        context_of=lambda batch: context,
        loss=lambda outputs, targets, auxiliary: outputs.sum(),
        scaled=lambda loss: loss * 0.5,
    )


def test_deepspeed_is_told_which_micro_batch_ends_the_step() -> None:
    engine, phases = RecordingEngine(), []
    passes = ShardedPasses(LayerStack([]))
    passes.connect(engine, SimpleNamespace(sum_over_ranks=lambda *_: None), (), (), phases.append)  # type: ignore[arg-type]
    passes.train([BATCH, BATCH], losses_of(engine))
    boundary, last = ("set_gradient_accumulation_boundary", False), ("set_gradient_accumulation_boundary", True)
    steps = [("forward", True), ("backward",), ("step",)]
    assert engine.asked == [boundary, *steps, last, *steps]
    assert phases == ["forward", "backward", "step"] * 2
    engine.asked.clear()
    passes.evaluate([BATCH], losses_of(engine))
    assert engine.asked == [("forward", False)]


def test_gradients_are_taken_after_each_micro_batch_and_reduced_once() -> None:
    engine, phases = RecordingEngine(), []
    weight = torch.nn.Parameter(torch.ones(2))

    class Owner:
        def sum_over_ranks(self, partial: Any, tied: Any) -> None:
            assert not partial and not tied

        def begin(self, passes: int) -> None:
            engine.asked.append(("begin", passes))

        def accumulate(self) -> None:
            engine.asked.append(("accumulate", *weight.grad.tolist()))
            weight.grad = None

        def reduce(self) -> None:
            engine.asked.append(("reduce",))

    stack: Any = lambda inputs, context: inputs * weight  # noqa: E731
    passes = PlainPasses(stack)
    passes.connect(engine, Owner(), (), (), phases.append)  # type: ignore[arg-type]
    passes.train([BATCH, BATCH], losses_of(engine))
    assert engine.asked == [("begin", 2), *[("accumulate", 0.5, 0.5)] * 2, ("reduce",), ("step",)]
    assert phases == ["forward", "backward"] * 2 + ["step"]
    engine.asked.clear()
    passes.evaluate([BATCH], losses_of(engine))
    assert engine.asked == []
