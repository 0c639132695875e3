"""Executes pipeline schedules: the passes of micro-batches through the chunks of this rank, and their messages.

Every rank reads every micro-batch, so that only hidden states and their gradients travel, in shapes that both ends
know, and the hidden states of an auxiliary network of the objective, such as a teacher. Messages are begun in
the order of the schedule, which is the same at both ends, and waited for by whoever needs them; nothing is sent twice,
and nothing is asked for before.
"""

from __future__ import annotations

import dataclasses
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from megatron.engine.micro_batch import DeviceBatch
from megatron.engine.passes.step_loss import StepLoss
from megatron.engine.pipeline.chunk_pass import ChunkPass, ChunkRunner
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import PendingMessage, start_receive, start_send
from megatron.parallel.schedule.actions import Action, Kind, Program, without_backward_before

# Of what a chunk and a micro-batch have.
Place = tuple[int, int]
# What travels from chunk to chunk: hidden states, and those of the auxiliary network if there is one.
Hidden = list[torch.Tensor]


class Executor:
    """Runs the programs of one pipeline rank.

    Args:
        runner: runs the chunks of this rank.
        axis: the ranks of the pipeline.
        world: all ranks. With two stages gradients travel in its group: NCCL has a communicator for each group and
            pair, in which messages in both directions take turns.
        take_gradients: called after each backward pass, and each half of one, with the parameters of its chunk.
        enter: called with each phase that begins.
    """

    def __init__(
        self,
        runner: ChunkRunner,
        axis: Axis,
        world: Axis,
        take_gradients: Callable[[Sequence[nn.Parameter]], None],
        enter: Callable[[str], None],
    ) -> None:
        self.runner, self.axis = runner, axis
        self._gradient_axis = dataclasses.replace(axis, group=world.group) if axis.size == 2 else axis
        self.take_gradients, self.enter = take_gradients, enter

    def axis_of(self, kind: Kind) -> Axis:
        """The ranks of the pipeline, in the group in which messages of a kind travel."""
        return self._gradient_axis if kind.is_of_backward else self.axis

    def run(self, program: Program, batches: Sequence[DeviceBatch], losses: StepLoss, *, trains: bool) -> int:
        """Executes a program of this rank.

        Args:
            batches: as many micro-batches as the program has.
            trains: whether autograd records the forward passes.

        Returns:
            The most forward passes whose activations were held at once.
        """
        if trains:
            self.runner.begin(program, batches, losses)
        execution = _Execution(self, batches, losses, trains)
        for action in without_backward_before(program, self.runner.chunks.first_trained):
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
        self._chunks = executor.runner.chunks
        self._auxiliary_network = losses.auxiliary_network if trains else None
        self._arriving: dict[tuple[Kind, Place], list[PendingMessage]] = {}
        self._sending: deque[PendingMessage] = deque()
        # Hidden states and gradients on their way to the next or previous chunk, which may be on this rank.
        self._outputs: dict[Place, Hidden] = {}
        self._gradients: dict[Place, torch.Tensor] = {}
        # Those whose backward pass, or the second half of it, is still to come.
        self._alive: dict[Place, ChunkPass] = {}
        self._halved: dict[Place, ChunkPass] = {}
        self.most_held = 0

    def execute(self, action: Action) -> None:
        _STEPS[action.kind](self, action)

    def finish(self) -> None:
        """Waits until everything that was sent has left."""
        self._executor.enter("p2p")
        while self._sending:
            self._sending.popleft().wait()

    def _forward(self, action: Action) -> None:
        chunk, is_last = action.chunk, self._chunks.is_last(action.chunk)
        place, batch = (chunk, action.micro_batch), self._batches[action.micro_batch]
        before = self._hidden_before(place)
        hidden = before[0] if before else None
        trains = self._trains and self._chunks.passes_gradient(chunk)
        self._executor.enter("forward")
        auxiliary, named = [], {}
        if self._auxiliary_network is not None:
            auxiliary = [
                self._auxiliary_network.forward(chunk, before[1] if before else batch.network_input, batch.passed)
            ]
            named = {self._auxiliary_network.output_name: auxiliary[0]} if is_last else {}
        output, passed = self._executor.runner.forward(chunk, batch, hidden, self._losses, named, trains=trains)
        if not is_last:
            self._outputs[place] = [output, *auxiliary]
        if passed is not None:
            self._alive[place] = passed
            self.most_held = max(self.most_held, len(self._alive) + len(self._halved))

    def _hidden_before(self, place: Place) -> Hidden:
        """The hidden states that enter a chunk, of both networks; none for the first, which reads the micro-batch."""
        chunk, micro_batch = place
        if chunk == 0:
            return []
        messages = self._arriving.pop((Kind.RECEIVE_FORWARD, place), None)
        return self._outputs.pop((chunk - 1, micro_batch)) if messages is None else self._wait(messages)

    def _backward(self, action: Action) -> None:
        place = action.chunk, action.micro_batch
        passed, gradient = self._alive.pop(place), self._gradient_after(place)
        self._executor.enter("backward")
        self._pass_on(place, passed.backward(gradient))
        self._executor.take_gradients(self._executor.runner.after_backward(action.chunk))

    def _input_backward(self, action: Action) -> None:
        place = action.chunk, action.micro_batch
        passed, gradient = self._alive.pop(place), self._gradient_after(place)
        self._executor.enter("backward")
        self._pass_on(place, passed.backward_of_input(gradient))
        self._executor.take_gradients(self._executor.runner.after_backward(action.chunk))
        self._halved[place] = passed

    def _weight_backward(self, action: Action) -> None:
        self._executor.enter("backward")
        self._halved.pop((action.chunk, action.micro_batch)).backward_of_weights()
        self._executor.take_gradients(self._executor.runner.after_backward(action.chunk))

    def _gradient_after(self, place: Place) -> torch.Tensor:
        if self._chunks.is_last(place[0]):
            return self._losses.seed()
        messages = self._arriving.pop((Kind.RECEIVE_BACKWARD, place), None)
        return self._gradients.pop(place) if messages is None else self._wait(messages)[0]

    def _pass_on(self, place: Place, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._gradients[place[0] - 1, place[1]] = gradient

    def _send_forward(self, action: Action) -> None:
        for hidden in self._outputs.pop((action.chunk, action.micro_batch)):
            self._send(hidden, action)

    def _send_backward(self, action: Action) -> None:
        self._send(self._gradients.pop((action.chunk - 1, action.micro_batch)), action)

    def _send(self, tensor: torch.Tensor, action: Action) -> None:
        self._executor.enter("p2p")
        while self._sending and self._sending[0].has_arrived:
            self._sending.popleft().wait()  # raises if it failed
        self._sending.append(start_send(tensor, self._executor.axis_of(action.kind), _peer(action)))
        if tensor.device.type == "cpu" and len(self._sending) > 2 * self._executor.axis.size:
            self._sending.popleft().wait()  # gloo says only then that it has sent, and the tensor is kept until then

    def _receive(self, action: Action) -> None:
        executor, batch = self._executor, self._batches[action.micro_batch]
        executor.enter("p2p")
        settings, like = self._losses.settings, batch.passed[0]
        rooms = [torch.empty(settings.hidden_shape(*batch.shape), dtype=settings.dtype, device=like.device)]
        if self._auxiliary_network is not None and action.kind is Kind.RECEIVE_FORWARD:
            rooms.append(self._auxiliary_network.empty_hidden(*batch.shape, like))
        place, peer, axis = (action.chunk, action.micro_batch), _peer(action), executor.axis_of(action.kind)
        self._arriving[action.kind, place] = [start_receive(room, axis, peer) for room in rooms]

    def _wait(self, messages: Sequence[PendingMessage]) -> Hidden:
        self._executor.enter("p2p")
        return [message.wait() for message in messages]


# Functions, not bound methods: an execution that refers to itself would keep its batches until Python collects garbage.
_STEPS: Mapping[Kind, Callable[[_Execution, Action], None]] = types.MappingProxyType(
    {
        Kind.FORWARD: _Execution._forward,
        Kind.BACKWARD: _Execution._backward,
        Kind.INPUT_BACKWARD: _Execution._input_backward,
        Kind.WEIGHT_BACKWARD: _Execution._weight_backward,
        Kind.SEND_FORWARD: _Execution._send_forward,
        Kind.SEND_BACKWARD: _Execution._send_backward,
        Kind.RECEIVE_FORWARD: _Execution._receive,
        Kind.RECEIVE_BACKWARD: _Execution._receive,
    }
)


def _peer(action: Action) -> int:
    if action.peer is None:
        raise ValueError(f"the message {action} has no other end")
    return action.peer
