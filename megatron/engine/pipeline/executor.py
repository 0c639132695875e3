"""Executes pipeline schedules: the passes of micro-batches through the chunks of this rank, and their messages.

Every rank reads every micro-batch, so messages carry only hidden states and their gradients, and hidden states of an
objective's auxiliary network, such as a teacher, in shapes that both ends know. Messages are started in the order of
the schedule, which is the same at both ends, and awaited when their content is used.
"""

from __future__ import annotations

import dataclasses
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from megatron.engine.gradients.gradient_owner import GradientOwner
from megatron.engine.micro_batch import DeviceBatch
from megatron.engine.passes.step_loss import StepLoss
from megatron.engine.pipeline.chunk_pass import ChunkPass, ChunkRunner
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import PendingMessage, start_receive, start_send
from megatron.parallel.schedule.actions import Action, Kind, Program, without_backward_before

_BACKWARD = (Kind.BACKWARD, Kind.INPUT_BACKWARD, Kind.WEIGHT_BACKWARD)
# A chunk and a micro-batch.
ChunkKey = tuple[int, int]
# Hidden states between chunks: the network's, and the auxiliary network's if there is one.
Hidden = list[torch.Tensor]


class Executor:
    """Runs the programs of one pipeline rank.

    Args:
        runner: runs the chunks of this rank.
        axis: the ranks of the pipeline.
        world: all ranks. With two stages its group carries the gradients: NCCL has one communicator per group and pair
            of ranks, which would serialize the messages of both directions.
        gradients: takes the gradients of a chunk's parameters after each backward pass or half of one.
        enter: called with each phase that begins.
    """

    def __init__(
        self,
        runner: ChunkRunner,
        axis: Axis,
        world: Axis,
        gradients: GradientOwner,
        enter: Callable[[str], None],
    ) -> None:
        self.runner, self.axis = runner, axis
        self._gradient_axis = dataclasses.replace(axis, group=world.group) if axis.size == 2 else axis
        self.gradients, self.enter = gradients, enter

    def axis_of(self, kind: Kind) -> Axis:
        """The ranks of the pipeline, with the group for messages of a kind."""
        return self._gradient_axis if kind.is_of_backward else self.axis

    def run(self, program: Program, batches: Sequence[DeviceBatch], losses: StepLoss, *, trains: bool) -> int:
        """Executes a program of this rank.

        Args:
            batches: the micro-batches of the program.
            trains: autograd records the forward passes.

        Returns:
            The peak number of forward passes whose activations were held.
        """
        if trains:
            self.runner.begin(program, batches, losses)
        program = without_backward_before(program, self.runner.chunks.first_trained)
        execution = _Execution(self, batches, losses, trains)
        last = {action.chunk: action for action in program if action.kind in _BACKWARD}
        for action in reversed([action for action in program if action is last.get(action.chunk)]):
            for parameter in self.runner.after_backward(action.chunk):
                execution.last.setdefault(id(parameter), action)
        for action in program:
            execution.execute(action)
        execution.finish()
        return execution.most_held


class _Execution:
    """The state of one run of a program.

    Attributes:
        most_held: the peak number of forward passes whose activations were held.
        last: the last backward pass, or half of one, of each parameter, by its id; chunks may share a parameter.
    """

    def __init__(self, executor: Executor, batches: Sequence[DeviceBatch], losses: StepLoss, trains: bool) -> None:
        self._executor, self._batches, self._losses, self._trains = executor, batches, losses, trains
        self._chunks = executor.runner.chunks
        self._auxiliary_network = losses.auxiliary_network if trains else None
        self._arriving: dict[tuple[Kind, ChunkKey], list[PendingMessage]] = {}
        self._sending: deque[PendingMessage] = deque()
        # Hidden states and gradients for the next or previous chunk, which may be on this rank.
        self._outputs: dict[ChunkKey, Hidden] = {}
        self._gradients: dict[ChunkKey, torch.Tensor] = {}
        # Passes whose backward pass, or its second half, is still to come.
        self._alive: dict[ChunkKey, ChunkPass] = {}
        self._halved: dict[ChunkKey, ChunkPass] = {}
        self.most_held = 0
        self.last: dict[int, Action] = {}

    def execute(self, action: Action) -> None:
        _STEPS[action.kind](self, action)

    def finish(self) -> None:
        """Waits for all sends."""
        self._executor.enter("p2p")
        while self._sending:
            self._sending.popleft().wait()

    def _forward(self, action: Action) -> None:
        chunk, is_last = action.chunk, self._chunks.is_last(action.chunk)
        key, batch = (chunk, action.micro_batch), self._batches[action.micro_batch]
        inputs = self._hidden_before(key)
        hidden = inputs[0] if inputs else None
        trains = self._trains and self._chunks.passes_gradient(chunk)
        self._executor.enter("forward")
        auxiliary, targets = [], {}
        if self._auxiliary_network is not None:
            auxiliary_input = inputs[1] if inputs else batch.network_input
            auxiliary = [self._auxiliary_network.forward(chunk, auxiliary_input, batch.passed)]
            targets = {self._auxiliary_network.output_name: auxiliary[0]} if is_last else {}
        output, passed = self._executor.runner.forward(chunk, batch, hidden, self._losses, targets, trains=trains)
        if not is_last:
            self._outputs[key] = [output, *auxiliary]
        if passed is not None:
            self._alive[key] = passed
            self.most_held = max(self.most_held, len(self._alive) + len(self._halved))

    def _hidden_before(self, key: ChunkKey) -> Hidden:
        """The hidden states that enter a chunk, of both networks; none for the first, which reads the micro-batch."""
        chunk, micro_batch = key
        if chunk == 0:
            return []
        messages = self._arriving.pop((Kind.RECEIVE_FORWARD, key), None)
        return self._outputs.pop((chunk - 1, micro_batch)) if messages is None else self._wait(messages)

    def _backward(self, action: Action) -> None:
        key = action.chunk, action.micro_batch
        passed, gradient = self._alive.pop(key), self._gradient_after(key)
        self._executor.enter("backward")
        self._executor.gradients.begin_last(self._complete_after(action))
        self._store_gradient(key, passed.backward(gradient))
        self._take_gradients(action)

    def _input_backward(self, action: Action) -> None:
        key = action.chunk, action.micro_batch
        passed, gradient = self._alive.pop(key), self._gradient_after(key)
        self._executor.enter("backward")
        self._store_gradient(key, passed.backward_of_input(gradient))
        self._take_gradients(action)
        self._halved[key] = passed

    def _weight_backward(self, action: Action) -> None:
        self._executor.enter("backward")
        self._halved.pop((action.chunk, action.micro_batch)).backward_of_weights()
        self._take_gradients(action)

    def _take_gradients(self, action: Action) -> None:
        self._executor.gradients.accumulate(self._executor.runner.after_backward(action.chunk))
        self._executor.gradients.end_last(self._complete_after(action))

    def _complete_after(self, action: Action) -> list[nn.Parameter]:
        """The parameters that have no gradient after this one."""
        return [each for each in self._executor.runner.after_backward(action.chunk) if self.last[id(each)] is action]

    def _gradient_after(self, key: ChunkKey) -> torch.Tensor:
        if self._chunks.is_last(key[0]):
            return self._losses.seed()
        messages = self._arriving.pop((Kind.RECEIVE_BACKWARD, key), None)
        return self._gradients.pop(key) if messages is None else self._wait(messages)[0]

    def _store_gradient(self, key: ChunkKey, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._gradients[key[0] - 1, key[1]] = gradient

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
            self._sending.popleft().wait()  # gloo completes sends only in `wait`, and tensors are held until then

    def _receive(self, action: Action) -> None:
        executor, batch = self._executor, self._batches[action.micro_batch]
        executor.enter("p2p")
        settings, like = self._losses.settings, batch.passed[0]
        buffers = [torch.empty(settings.hidden_shape(*batch.shape), dtype=settings.dtype, device=like.device)]
        if self._auxiliary_network is not None and action.kind is Kind.RECEIVE_FORWARD:
            buffers.append(self._auxiliary_network.empty_hidden(*batch.shape, like))
        key, peer, axis = (action.chunk, action.micro_batch), _peer(action), executor.axis_of(action.kind)
        self._arriving[action.kind, key] = [start_receive(buffer, axis, peer) for buffer in buffers]

    def _wait(self, messages: Sequence[PendingMessage]) -> Hidden:
        self._executor.enter("p2p")
        return [message.wait() for message in messages]


# Functions, not bound methods: a reference cycle would keep the batches alive until the next garbage collection.
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
        raise ValueError(f"the message {action} has no peer")
    return action.peer
