"""The passes of a pipeline's chunks as CUDA graphs.

A forward pass is one graph; a backward pass is another, or two where a schedule computes weight gradients apart. In
between, other micro-batches pass through the chunk, so there are as many sets of graphs as it has passes at a time,
each with memory of its own. They are captured before the first action of a step, while no message is on its way.
Messages take their time, so what they carry is copied from where a graph writes it.
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
    give_gradients,
    match_layout,
    static,
    warn_of_capture,
)
from megatron.engine.micro_batch import DeviceBatch
from megatron.engine.passes.step_loss import StepLoss
from megatron.engine.pipeline.chunk_pass import ChunkPass, ChunkRunner
from megatron.parallel.schedule.actions import Kind, Program

# Chunk, and whether its backward pass comes in two halves.
_Way = tuple[int, bool]


class GraphedChunkRunner(ChunkRunner):
    """Runs the chunks of a rank, as they are until libraries have chosen their kernels, then as graphs.

    Args:
        runner: runs them as they are.
        adds_up: whether gradients stay in `.grad` from one micro-batch to the next.
    """

    def __init__(self, runner: ChunkRunner, capturer: GraphCapturer, *, adds_up: bool) -> None:
        vars(self).update(vars(runner))  # layers and queues know each other already
        self._capturer, self._adds_up = capturer, adds_up
        self._settings: Hashable = None
        self._met = 0
        self._is_refused = False
        self._sets: dict[_Way, list[_GraphSet]] = defaultdict(list)
        self._free: dict[_Way, list[_GraphSet]] = {}
        self._ways: dict[int, dict[int, bool]] = {}

    @property
    def count(self) -> int:
        return sum(map(len, self._sets.values()))

    def begin(self, program: Program, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        """Captures what a step needs, once micro-batches of its shape have been met often; releases what has changed
        since: shape, settings or which parameters are trained. What cannot be captured runs as it is from now on.
        """
        if self._is_refused:
            return
        trained = tuple(each.requires_grad for each in self.stack.parameters())
        shapes = frozenset(map(batch_shape, batches))
        settings = (shapes, len(batches), batches[0].target_names, losses.settings, id(losses.objective), trained)
        if settings != self._settings:
            self.release()
            self._settings = settings
        self._free = {}
        if self._met < WARM_UP_MICRO_BATCHES or len(shapes) > 1:
            self._met += len(batches)
            return
        halved = {(each.chunk, each.micro_batch) for each in program if each.kind is Kind.INPUT_BACKWARD}
        self._ways = {id(batch): {c: (c, n) in halved for c in self.chunks.layers} for n, batch in enumerate(batches)}
        try:
            for way, needed in _most_at_once(program, halved).items():
                if self.chunks.passes_gradient(way[0]):
                    while len(self._sets[way]) < needed:
                        self._sets[way].append(_GraphSet(self, way, batches[0], losses, self._capturer))
        except CaptureError as failure:
            self._is_refused = True
            self.release()
            warn_of_capture(failure)
        self._free = {way: list(sets) for way, sets in self._sets.items()}

    def forward(
        self,
        chunk: int,
        batch: DeviceBatch,
        hidden: torch.Tensor | None,
        losses: StepLoss,
        given: Mapping[str, torch.Tensor],
        *,
        trains: bool,
    ) -> tuple[torch.Tensor, ChunkPass | None]:
        """As that of `ChunkRunner`; `begin` has been called for the step."""
        if not trains or self._is_refused:
            return super().forward(chunk, batch, hidden, losses, given, trains=trains)
        if not self._free:
            output, passed = self._capturer.warm_up(
                lambda: ChunkRunner.forward(self, chunk, batch, hidden, losses, given, trains=True)
            )
            return output, None if passed is None else _WarmUp(passed, self._capturer)
        free = self._free[chunk, self._ways[id(batch)][chunk]]
        graphs = free.pop()
        output = graphs.run_forward(batch, hidden, losses)
        return output, _GraphPass(graphs, free, adds_up=self._adds_up)

    def graph_queue(self, chunk: int) -> Any:
        """Where the layers of a chunk leave weight gradients for later."""
        return self._queues[chunk]

    def release(self) -> None:
        """Frees all graphs; they are captured again after a while."""
        for sets in self._sets.values():
            for each in sets:
                each.release()
        self._sets.clear()
        self._met = 0


def _most_at_once(program: Program, halved: set[tuple[int, int]]) -> dict[_Way, int]:
    now: Counter[_Way] = Counter()
    most: dict[_Way, int] = {}
    for action in program:
        way = action.chunk, (action.chunk, action.micro_batch) in halved
        if action.kind is Kind.FORWARD:
            now[way] += 1
            most[way] = max(most.get(way, 0), now[way])
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT_BACKWARD):
            now[way] -= 1
    return most


class _GraphSet:
    """The graphs of one pass through a chunk at a time: what is read and written where.

    Attributes:
        hidden: the input; None for the first chunk.
        output: where the forward graph writes; the loss in the last chunk.
        sums: the totals of the pass, written by it as well.
        gradient: that of the output, which the backward graph reads.
        of_input: where it writes that of the input; None if it has none.
        gradients: those of the parameters by graph: what the whole or the first half writes, and what the second does.
    """

    def __init__(
        self, runner: GraphedChunkRunner, way: _Way, batch: DeviceBatch, losses: StepLoss, capturer: GraphCapturer
    ) -> None:
        chunk, is_halved = way
        chunks, memory = runner.chunks, capturer.new_memory()
        self.inputs = static(batch)
        takes_gradient = chunk > 0 and chunks.passes_gradient(chunk - 1)
        self.hidden: torch.Tensor | None = None
        if chunk > 0:
            shape = losses.settings.hidden_shape(*batch.shape)
            self.hidden = torch.zeros(shape, dtype=losses.settings.dtype, device=batch.passed[0].device)
            self.hidden.requires_grad_(takes_gradient)
        parameters = runner.after_backward(chunk)
        inputs = [self.hidden] if takes_gradient and self.hidden is not None else []

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            own = losses.with_new_totals()
            with torch.enable_grad():
                return runner.compute(chunk, self.inputs, self.hidden, own, {}), own.totals.sums

        self.forward, (output, self.sums) = capturer.capture(forward, memory)
        self.output = output.detach()
        self.gradient = torch.zeros_like(self.output)
        queue = runner.graph_queue(chunk)

        def backward() -> tuple[list[torch.Tensor | None], list[Any]]:
            if is_halved:
                queue.open()
            try:
                found = torch.autograd.grad(output, [*inputs, *parameters], self.gradient, allow_unused=True)
            finally:
                later = queue.close() if is_halved else []
            shaped = [match_layout(*pair) for pair in zip(parameters, found[len(inputs) :], strict=True)]
            return [found[0] if inputs else None, *shaped], later

        self.backward, ((self.of_input, *first), works) = capturer.capture(backward, memory)
        self.gradients = [list(zip(parameters, first, strict=True))]
        self.weights: CapturedWork | None = None
        if is_halved:
            self.weights, second = capturer.capture(lambda: _done(works, parameters), memory)
            self.gradients.append(second)

    def run_forward(self, batch: DeviceBatch, hidden: torch.Tensor | None, losses: StepLoss) -> torch.Tensor:
        """The output of a micro-batch, whose totals are added to those of the step."""
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
    """The gradients that works add to `.grad`, which is left as it was."""
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
    """A pass that graphs make; its set is free again when it is over."""

    def __init__(self, graphs: _GraphSet, free: list[_GraphSet], *, adds_up: bool) -> None:
        self._graphs, self._free, self._adds_up = graphs, free, adds_up

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        of_input = self.backward_of_input(gradient)
        self._free.append(self._graphs)
        return of_input

    def backward_of_input(self, gradient: torch.Tensor) -> torch.Tensor | None:
        graphs = self._graphs
        graphs.gradient.copy_(gradient)
        graphs.backward.replay()
        give_gradients(graphs.gradients[0], adds_up=self._adds_up)
        return None if graphs.of_input is None else graphs.of_input.clone()

    def backward_of_weights(self) -> None:
        graphs = self._graphs
        if graphs.weights is not None:
            graphs.weights.replay()
            give_gradients(graphs.gradients[1], adds_up=self._adds_up)
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
