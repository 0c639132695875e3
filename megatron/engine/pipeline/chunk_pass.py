"""The pass of a micro-batch through a chunk of layers: forward, and backward as a whole or in two halves.

Nothing here knows of schedules or messages. Whatever else runs chunks, such as recorded kernels, takes the place of
`ChunkRunner.forward` and returns an output with what has the methods of a `ChunkPass`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from megatron.engine.micro_batch import DeviceBatch
from megatron.engine.passes.step_loss import StepLoss
from megatron.engine.pipeline.chunks import Chunks
from megatron.model.interface.network import LayerStack
from megatron.parallel.schedule.actions import Program
from megatron.parallel.tensor.weight_gradients import WeightGradientQueue, Work


class ChunkPass:
    """What a forward pass has left for the backward pass; of the methods the first alone is called, or the other two in
    turn.

    Gradients of parameters are added to their `.grad`. The output itself is not kept: whoever has sent it frees it.

    Shapes: gradients as hidden states; that of the loss `[]`.

    Args:
        hidden: the input; None for the micro-batch's own.
        output: as autograd knows it.
        queue: of the chunk's layers.
    """

    def __init__(self, hidden: torch.Tensor | None, output: torch.Tensor, queue: WeightGradientQueue) -> None:
        self._hidden, self._root, self._queue = hidden, get_gradient_edge(output), queue
        self._work: deque[Work] = deque()

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Computes all gradients from that of the output; returns that of the input, None if it has none."""
        hidden, root = self._hidden, self._root
        del self._hidden, self._root  # autograd frees activations while it runs
        torch.autograd.backward((root,), (gradient,))
        return None if hidden is None else hidden.grad

    def backward_of_input(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """As `backward`, but puts off the gradients of matrices."""
        self._queue.open()
        of_input = self.backward(gradient)
        self._work = deque(self._queue.close())
        return of_input

    def backward_of_weights(self) -> None:
        while self._work:
            self._work.popleft()()  # and frees the activations that it was made of


class ChunkRunner:
    """Runs the chunks of a rank.

    Args:
        stack: the layers of the rank.
        chunks: their division into chunks.
        splits_backward: whether backward passes may be asked for in two halves.
    """

    def __init__(self, stack: LayerStack, chunks: Chunks, *, splits_backward: bool = False) -> None:
        self.stack, self.chunks = stack, chunks
        layers = [layer for _, layer in stack.named_layers()]
        self._parameters: dict[int, list[nn.Parameter]] = {}
        self._queues: dict[int, WeightGradientQueue] = {}
        for chunk, places in chunks.layers.items():
            own = nn.ModuleList([layers[place] for place in places])
            self._parameters[chunk] = [parameter for parameter in own.parameters() if parameter.requires_grad]
            self._queues[chunk] = WeightGradientQueue()
            for module in own.modules() if splits_backward else ():
                if hasattr(module, "queue"):
                    module.queue = self._queues[chunk]  # type: ignore[assignment]

    def begin(self, program: Program, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        """Announces the actions of a step before the first of them; nothing is on its way between ranks."""

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
        """A forward pass, in the last chunk with the loss: its output, without what autograd knows of it, and what the
        backward pass needs; nothing where none follows.

        Args:
            hidden: the output of the chunk before; None for the first one.
            given: what the objective is given besides the targets of the micro-batch.
            trains: whether a backward pass follows.
        """
        takes_gradient = trains and self.chunks.passes_gradient(chunk - 1)
        if hidden is not None:
            hidden.requires_grad_(takes_gradient)
        with torch.set_grad_enabled(trains):
            output = self.compute(chunk, batch, hidden, losses, given)
        passed = ChunkPass(hidden if takes_gradient else None, output, self._queues[chunk]) if trains else None
        return output.detach(), passed

    def compute(
        self,
        chunk: int,
        batch: DeviceBatch,
        hidden: torch.Tensor | None,
        losses: StepLoss,
        given: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """The output of a chunk, as autograd knows it; see `forward`."""
        context = losses.context_of(batch)
        output = self.stack(batch.network_input if hidden is None else hidden, context, self.chunks.layers[chunk])
        losses.take_auxiliary(context.auxiliary)
        return losses.of(output, batch.targets, given=given) if self.chunks.is_last(chunk) else output

    def after_backward(self, chunk: int) -> list[nn.Parameter]:
        """The parameters that a backward pass, or a half of it, may have left gradients of."""
        return self._parameters[chunk]
