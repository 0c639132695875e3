"""Executes pipeline schedules: the passes of micro-batches through the chunks of this rank, and their messages.

Every rank reads every micro-batch, so that only hidden states and their gradients travel, in shapes that both ends
know. Messages are begun in the order of the schedule, which is the same at both ends, and waited for by whoever needs
them; nothing is sent twice, and nothing is asked for before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from megatron.engine.micro_batch import DeviceBatch
from megatron.engine.passes.step_loss import StepLoss
from megatron.engine.pipeline.chunks import Chunks
from megatron.model.interface.network import LayerStack
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import PendingMessage, start_receive, start_send
from megatron.parallel.schedule.actions import Action, Kind, Program
from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.weight_gradients import WeightGradientQueue, Work

# Of what a chunk and a micro-batch have.
Place = tuple[int, int]


class Executor:
    """Runs the programs of one pipeline rank.

    Args:
        stack: the layers of this rank.
        chunks: their division into chunks.
        axis: the ranks of the pipeline.
        take_gradients: called after each backward pass with the parameters that now have gradients.
        enter: called with each phase that begins.
        splits_backward: whether the schedules compute weight gradients apart.
    """

    def __init__(
        self,
        stack: LayerStack,
        chunks: Chunks,
        axis: Axis,
        take_gradients: Callable[[Sequence[nn.Parameter]], None],
        enter: Callable[[str], None],
        *,
        splits_backward: bool = False,
    ) -> None:
        self.stack, self.chunks, self.axis = stack, chunks, axis
        self.take_gradients, self.enter = take_gradients, enter
        layers = [layer for _, layer in stack.named_layers()]
        self.parameters: dict[int, list[nn.Parameter]] = {}
        self.queues: dict[int, WeightGradientQueue] = {}
        self.deferred: set[int] = set()  # ids of the parameters whose gradients come from a queue
        for chunk, places in chunks.layers.items():
            own = nn.ModuleList([layers[place] for place in places])
            self.parameters[chunk] = [parameter for parameter in own.parameters() if parameter.requires_grad]
            self.queues[chunk] = WeightGradientQueue()
            for module in own.modules() if splits_backward else ():
                if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                    module.queue = self.queues[chunk]
                    self.deferred.update(map(id, module.parameters(recurse=False)))

    def run(self, program: Program, batches: Sequence[DeviceBatch], losses: StepLoss, *, trains: bool) -> int:
        """Executes a program of this rank.

        Args:
            batches: as many micro-batches as the program has.
            trains: whether autograd records the forward passes.

        Returns:
            The most forward passes whose activations were held at once.
        """
        execution = _Execution(self, batches, losses, trains)
        for action in program:
            execution.execute(action)
        execution.finish()
        return execution.most_held


class _Execution:
    """One run of a program: what is alive in it.

    Attributes:
        most_held: the most forward passes whose activations were held at once.
    """

    def __init__(self, executor: Executor, batches: Sequence[DeviceBatch], losses: StepLoss, trains: bool) -> None:
        self._executor, self._batches, self._losses, self._trains = executor, batches, losses, trains
        self._last = executor.chunks.count - 1
        self._arriving: dict[tuple[Kind, Place], PendingMessage] = {}
        self._sending: deque[PendingMessage] = deque()
        # Hidden states and gradients on their way to the next or previous chunk, which may be on this rank.
        self._outputs: dict[Place, torch.Tensor] = {}
        self._gradients: dict[Place, torch.Tensor] = {}
        # What the backward pass of a chunk needs.
        self._alive: dict[Place, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._work: dict[Place, list[Work]] = {}
        self.most_held = 0
        self._steps: Mapping[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_BACKWARD: self._input_backward,
            Kind.WEIGHT_BACKWARD: self._weight_backward,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECEIVE_FORWARD: self._receive,
            Kind.RECEIVE_BACKWARD: self._receive,
        }

    def execute(self, action: Action) -> None:
        """Does what an action says."""
        self._steps[action.kind](action)

    def finish(self) -> None:
        """Waits until everything that was sent has left."""
        self._executor.enter("p2p")
        while self._sending:
            self._sending.popleft().wait()

    def _forward(self, action: Action) -> None:
        executor, chunk = self._executor, action.chunk
        place, batch = (chunk, action.micro_batch), self._batches[action.micro_batch]
        hidden = self._hidden_before(place)
        executor.enter("forward")
        context = self._losses.context_of(batch)
        with torch.set_grad_enabled(self._trains):
            inputs = batch.network_input if hidden is None else hidden
            output = executor.stack(inputs, context, executor.chunks.layers[chunk])
            self._losses.take_auxiliary(context.auxiliary)
            if chunk == self._last:
                output = self._losses.of(output, batch.targets)
        if chunk != self._last:
            self._outputs[place] = output.detach()
        if self._trains:
            self._alive[place] = hidden, output
            self.most_held = max(self.most_held, len(self._alive) + len(self._work))

    def _hidden_before(self, place: Place) -> torch.Tensor | None:
        """The input of a chunk, as a leaf of autograd's graph; None for the first, which takes the micro-batch's."""
        chunk, micro_batch = place
        if chunk == 0:
            return None
        message = self._arriving.pop((Kind.RECEIVE_FORWARD, place), None)
        hidden = self._outputs.pop((chunk - 1, micro_batch)) if message is None else self._wait(message)
        return hidden.requires_grad_(self._trains)

    def _backward(self, action: Action) -> None:
        place = action.chunk, action.micro_batch
        hidden, output = self._alive.pop(place)
        gradient = self._gradient_after(place)
        self._executor.enter("backward")
        if output.requires_grad:  # else everything before is frozen
            torch.autograd.backward(output, gradient)
            self._take_gradients(action)
        if hidden is not None and hidden.grad is not None:
            self._gradients[action.chunk - 1, action.micro_batch] = hidden.grad

    def _gradient_after(self, place: Place) -> torch.Tensor:
        """The gradient of a chunk's output."""
        if place[0] == self._last:
            return torch.full((), self._losses.backward_scale, device=self._batches[0].passed[0].device)
        message = self._arriving.pop((Kind.RECEIVE_BACKWARD, place), None)
        return self._gradients.pop(place) if message is None else self._wait(message)

    def _input_backward(self, action: Action) -> None:
        queue = self._executor.queues[action.chunk]
        queue.open()
        self._backward(action)
        self._work[action.chunk, action.micro_batch] = queue.close()

    def _weight_backward(self, action: Action) -> None:
        self._executor.enter("backward")
        works = deque(self._work.pop((action.chunk, action.micro_batch)))
        while works:
            works.popleft()()  # and frees the activations that it was made of
        self._take_gradients(action)

    def _take_gradients(self, action: Action) -> None:
        """Hands on what a backward pass has left; the halves of one leave those of different parameters.

        Hooks may have taken gradients of the first half already: whoever they belong to learns that the pass is over.
        """
        parameters, deferred = self._executor.parameters[action.chunk], self._executor.deferred
        if action.kind is not Kind.BACKWARD:
            is_first = action.kind is Kind.INPUT_BACKWARD
            parameters = [
                each for each in parameters if each.grad is not None or (is_first and id(each) not in deferred)
            ]
        self._executor.take_gradients(parameters)

    def _send_forward(self, action: Action) -> None:
        self._send(self._outputs.pop((action.chunk, action.micro_batch)), action)

    def _send_backward(self, action: Action) -> None:
        self._send(self._gradients.pop((action.chunk - 1, action.micro_batch)), action)

    def _send(self, tensor: torch.Tensor, action: Action) -> None:
        self._executor.enter("p2p")
        while self._sending and self._sending[0].has_arrived:
            self._sending.popleft().wait()  # raises if it failed
        self._sending.append(start_send(tensor, self._executor.axis, _peer(action)))
        if tensor.device.type == "cpu" and len(self._sending) > 2 * self._executor.axis.size:
            self._sending.popleft().wait()  # gloo says only then that it has sent, and the tensor is kept until then

    def _receive(self, action: Action) -> None:
        executor, batch = self._executor, self._batches[action.micro_batch]
        executor.enter("p2p")
        settings = self._losses.settings
        hidden = torch.empty(settings.hidden_shape(*batch.shape), dtype=settings.dtype, device=batch.passed[0].device)
        place = action.chunk, action.micro_batch
        self._arriving[action.kind, place] = start_receive(hidden, executor.axis, _peer(action))

    def _wait(self, message: PendingMessage) -> torch.Tensor:
        self._executor.enter("p2p")
        return message.wait()


def _peer(action: Action) -> int:
    if action.peer is None:
        raise ValueError(f"the message {action} has no other end")
    return action.peer
