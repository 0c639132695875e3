"""The passes of a pipeline's chunks as CUDA graphs.

A forward pass is one graph; a backward pass is another, or two if the schedule computes weight gradients separately.
Other micro-batches pass through the chunk in between, so it needs a set of graphs, each with separate memory, for every
pass that is in flight at once. Graphs are captured before the first action of a step, while no message is in transit.
Outputs are copied from a graph's buffers, because sends are asynchronous.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron.device import CapturedWork, CaptureError, GraphCapturer
from megatron.engine.cuda_graphs import (
    WARM_UP_MICRO_BATCHES,
    batch_shape,
    fill,
    match_layout,
    set_gradients,
    static_copy,
    warn_of_capture,
)
from megatron.engine.micro_batch import DeviceBatch
from megatron.engine.passes.step_loss import StepLoss
from megatron.engine.pipeline.chunk_pass import ChunkPass, ChunkRunner
from megatron.parallel.schedule.actions import Kind, Program

# A chunk, and True if its backward pass is split into two halves.
_Variant = tuple[int, bool]


class GraphedChunkRunner(ChunkRunner):
    """Runs the chunks of a rank as graphs, after a warm-up without graphs.

    Args:
        runner: runs the chunks without graphs.
        accumulates: gradients stay in `.grad` from one micro-batch to the next.
    """

    def __init__(self, runner: ChunkRunner, capturer: GraphCapturer, *, accumulates: bool) -> None:
        vars(self).update(vars(runner))  # layers are already connected to the runner's queues
        self._capturer, self._accumulates = capturer, accumulates
        self._settings: Hashable = None
        self._warm_ups = 0
        self._has_failed = False
        self._sets: dict[_Variant, list[_GraphSet]] = defaultdict(list)
        self._free: dict[_Variant, list[_GraphSet]] = {}
        self._is_halved: dict[int, dict[int, bool]] = {}  # by the id of a micro-batch and by chunk

    @property
    def count(self) -> int:
        return sum(map(len, self._sets.values()))

    def begin(self, program: Program, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        """Captures the graphs of a step after the warm-up, and releases them first if shape, settings or the set of
        trained parameters have changed. After a failed capture, graphs are never used again.
        """
        if self._has_failed:
            return
        trained = tuple(each.requires_grad for each in self.stack.parameters())
        shapes = frozenset(map(batch_shape, batches))
        settings = (shapes, len(batches), batches[0].target_names, losses.settings, id(losses.objective), trained)
        if settings != self._settings:
            self.release()
            self._settings = settings
        self._free = {}
        if self._warm_ups < WARM_UP_MICRO_BATCHES or len(shapes) > 1:
            self._warm_ups += len(batches)
            return
        halved = {(each.chunk, each.micro_batch) for each in program if each.kind is Kind.INPUT_BACKWARD}
        self._is_halved = {
            id(batch): {chunk: (chunk, number) in halved for chunk in self.chunks.layers}
            for number, batch in enumerate(batches)
        }
        try:
            for variant, needed in _most_in_flight(program, halved).items():
                if self.chunks.passes_gradient(variant[0]):
                    while len(self._sets[variant]) < needed:
                        self._sets[variant].append(_GraphSet(self, variant, batches[0], losses, self._capturer))
        except CaptureError as failure:
            self._has_failed = True
            self.release()
            warn_of_capture(failure)
        self._free = {variant: list(sets) for variant, sets in self._sets.items()}

    def forward(
        self,
        chunk: int,
        batch: DeviceBatch,
        hidden: torch.Tensor | None,
        losses: StepLoss,
        extra_targets: Mapping[str, torch.Tensor],
        *,
        trains: bool,
    ) -> tuple[torch.Tensor, ChunkPass | None]:
        """See `ChunkRunner`; `begin` has been called for the step."""
        if not trains or self._has_failed:
            return super().forward(chunk, batch, hidden, losses, extra_targets, trains=trains)
        if not self._free:
            output, passed = self._capturer.warm_up(
                lambda: ChunkRunner.forward(self, chunk, batch, hidden, losses, extra_targets, trains=True)
            )
            return output, None if passed is None else _WarmUp(passed, self._capturer)
        free = self._free[chunk, self._is_halved[id(batch)][chunk]]
        graphs = free.pop()
        output = graphs.run_forward(batch, hidden, losses)
        return output, _GraphPass(graphs, free, accumulates=self._accumulates)

    def weight_queue(self, chunk: int) -> Any:
        """The queue of deferred weight gradients of a chunk."""
        return self._queues[chunk]

    def release(self) -> None:
        """Frees all graphs; they are captured again after a warm-up."""
        for sets in self._sets.values():
            for each in sets:
                each.release()
        self._sets.clear()
        self._warm_ups = 0


def _most_in_flight(program: Program, halved: set[tuple[int, int]]) -> dict[_Variant, int]:
    in_flight: Counter[_Variant] = Counter()
    most: dict[_Variant, int] = {}
    for action in program:
        variant = action.chunk, (action.chunk, action.micro_batch) in halved
        if action.kind is Kind.FORWARD:
            in_flight[variant] += 1
            most[variant] = max(most.get(variant, 0), in_flight[variant])
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT_BACKWARD):
            in_flight[variant] -= 1
    return most


class _GraphSet:
    """The graphs of one pass through a chunk, with their buffers.

    Attributes:
        hidden: the input of the forward graph; None for the first chunk.
        output: its output; the loss in the last chunk.
        sums: its sums, see `StepTotals`.
        gradient: the gradient of the output, input of the backward graph.
        input_gradient: the gradient of the input; None if it has none.
        gradients: the gradients of the parameters, from the whole backward graph, or from each of its halves.
    """

    def __init__(
        self,
        runner: GraphedChunkRunner,
        variant: _Variant,
        batch: DeviceBatch,
        losses: StepLoss,
        capturer: GraphCapturer,
    ) -> None:
        chunk, is_halved = variant
        chunks, memory = runner.chunks, capturer.new_memory()
        self.inputs = static_copy(batch)
        takes_gradient = chunk > 0 and chunks.passes_gradient(chunk - 1)
        self.hidden: torch.Tensor | None = None
        if chunk > 0:
            shape = losses.settings.hidden_shape(*batch.shape)
            self.hidden = torch.zeros(shape, dtype=losses.settings.dtype, device=batch.passed[0].device)
            self.hidden.requires_grad_(takes_gradient)
        parameters = runner.after_backward(chunk)
        inputs = [self.hidden] if takes_gradient and self.hidden is not None else []

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            pass_losses = losses.with_new_totals()
            with torch.enable_grad():
                return runner.compute(chunk, self.inputs, self.hidden, pass_losses, {}), pass_losses.totals.sums

        self.forward, (output, self.sums) = capturer.capture(forward, memory)
        self.output = output.detach()
        self.gradient = torch.zeros_like(self.output)
        queue = runner.weight_queue(chunk)

        def backward() -> tuple[list[torch.Tensor | None], list[Any]]:
            if is_halved:
                queue.open()
            try:
                gradients = torch.autograd.grad(output, [*inputs, *parameters], self.gradient, allow_unused=True)
            finally:
                deferred = queue.close() if is_halved else []
            matched = [match_layout(*pair) for pair in zip(parameters, gradients[len(inputs) :], strict=True)]
            return [gradients[0] if inputs else None, *matched], deferred

        self.backward, ((self.input_gradient, *first), works) = capturer.capture(backward, memory)
        self.gradients = [list(zip(parameters, first, strict=True))]
        self.weights: CapturedWork | None = None
        if is_halved:
            self.weights, second = capturer.capture(lambda: _done(works, parameters), memory)
            self.gradients.append(second)

    def run_forward(self, batch: DeviceBatch, hidden: torch.Tensor | None, losses: StepLoss) -> torch.Tensor:
        """Returns the output of a micro-batch, and adds its totals to the step's."""
        fill(self.inputs, batch)
        if self.hidden is not None and hidden is not None:
            with torch.no_grad():
                self.hidden.copy_(hidden)
        self.forward.replay()
        losses.totals.add_sums(self.sums)
        return self.output.clone()

    def release(self) -> None:
        """Frees the graphs."""
        for work in (self.forward, self.backward, self.weights):
            if work is not None:
                work.release()


def _done(works: list[Any], parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
    """Runs deferred work and returns the gradients that it adds to `.grad`, which is restored."""
    before = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    try:
        while works:
            works.pop(0)()
        return [(each, match_layout(each, each.grad)) for each in parameters if each.grad is not None]
    finally:
        for each, gradient in zip(parameters, before, strict=True):
            each.grad = gradient


class _GraphPass(ChunkPass):
    """A pass by graphs, which returns its set to the free ones."""

    def __init__(self, graphs: _GraphSet, free: list[_GraphSet], *, accumulates: bool) -> None:
        self._graphs, self._free, self._accumulates = graphs, free, accumulates

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        input_gradient = self.backward_of_input(gradient)
        self._free.append(self._graphs)
        return input_gradient

    def backward_of_input(self, gradient: torch.Tensor) -> torch.Tensor | None:
        graphs = self._graphs
        graphs.gradient.copy_(gradient)
        graphs.backward.replay()
        set_gradients(graphs.gradients[0], accumulates=self._accumulates)
        return None if graphs.input_gradient is None else graphs.input_gradient.clone()

    def backward_of_weights(self) -> None:
        graphs = self._graphs
        if graphs.weights is not None:
            graphs.weights.replay()
            set_gradients(graphs.gradients[1], accumulates=self._accumulates)
        self._free.append(graphs)


class _WarmUp(ChunkPass):
    def __init__(self, passed: ChunkPass, capturer: GraphCapturer) -> None:
        self._passed, self._capturer = passed, capturer

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return self._capturer.warm_up(lambda: self._passed.backward(gradient))

    def backward_of_input(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return self._capturer.warm_up(lambda: self._passed.backward_of_input(gradient))

    def backward_of_weights(self) -> None:
        self._capturer.warm_up(self._passed.backward_of_weights)
