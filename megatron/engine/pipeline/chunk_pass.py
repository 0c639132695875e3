"""The pass of a micro-batch through a chunk of layers: forward, and backward as a whole or in two halves.

Independent of schedules and messages. Subclasses of `ChunkRunner` and `ChunkPass` run chunks in other ways, such as
CUDA graphs.
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
    """The backward pass of a forward pass: either `backward`, or `backward_of_input` and then `backward_of_weights`.

    Adds the gradients of parameters to their `.grad`. Does not keep the output, which is freed once it has been sent.

    Shapes: gradients as hidden states, or `[]` for the loss.

    Args:
        hidden: the input, if its gradient is needed; None otherwise.
        output: the output, with its autograd graph.
        queue: the queue of the chunk's layers.
    """

    def __init__(self, hidden: torch.Tensor | None, output: torch.Tensor, queue: WeightGradientQueue) -> None:
        self._hidden, self._root, self._queue = hidden, get_gradient_edge(output), queue
        self._work: deque[Work] = deque()

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Computes all gradients from the output's; returns the gradient of the input, None if it has none."""
        hidden, root = self._hidden, self._root
        del self._hidden, self._root  # autograd frees activations while it runs
        torch.autograd.backward((root,), (gradient,))
        return None if hidden is None else hidden.grad

    def backward_of_input(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """As `backward`, but defers the gradients of matrices."""
        self._queue.open()
        input_gradient = self.backward(gradient)
        self._work = deque(self._queue.close())
        return input_gradient

    def backward_of_weights(self) -> None:
        while self._work:
            self._work.popleft()()  # frees its activations


class ChunkRunner:
    """Runs the chunks of a rank.

    Args:
        stack: the layers of the rank.
        chunks: their division into chunks.
        splits_backward: the schedule may split a backward pass into two halves.
    """

    def __init__(self, stack: LayerStack, chunks: Chunks, *, splits_backward: bool = False) -> None:
        self.stack, self.chunks = stack, chunks
        layers = [layer for _, layer in stack.named_layers()]
        self._parameters: dict[int, list[nn.Parameter]] = {}
        self._queues: dict[int, WeightGradientQueue] = {}
        for chunk, indices in chunks.layers.items():
            chunk_layers = nn.ModuleList([layers[index] for index in indices])
            self._parameters[chunk] = [parameter for parameter in chunk_layers.parameters() if parameter.requires_grad]
            self._queues[chunk] = WeightGradientQueue()
            for module in chunk_layers.modules() if splits_backward else ():
                if hasattr(module, "queue"):
                    module.queue = self._queues[chunk]  # type: ignore[assignment]

    def begin(self, program: Program, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        """Announces the actions of a step before the first of them, while no message is in transit."""

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
        """Runs a forward pass, with the loss in the last chunk.

        Args:
            hidden: the output of the previous chunk; None for the first one.
            extra_targets: further targets of the objective, by name.
            trains: a backward pass follows.

        Returns:
            The detached output, and the backward pass if one follows.
        """
        takes_gradient = trains and self.chunks.passes_gradient(chunk - 1)
        if hidden is not None:
            hidden.requires_grad_(takes_gradient)
        with torch.set_grad_enabled(trains):
            output = self.compute(chunk, batch, hidden, losses, extra_targets)
        passed = ChunkPass(hidden if takes_gradient else None, output, self._queues[chunk]) if trains else None
        return output.detach(), passed

    def compute(
        self,
        chunk: int,
        batch: DeviceBatch,
        hidden: torch.Tensor | None,
        losses: StepLoss,
        extra_targets: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Computes the output of a chunk with its autograd graph; see `forward`."""
        context = losses.context_of(batch)
        output = self.stack(batch.network_input if hidden is None else hidden, context, self.chunks.layers[chunk])
        losses.add_auxiliary(context.auxiliary)
        if self.chunks.is_last(chunk):
            return losses.loss(output, batch.targets, extra_targets=extra_targets)
        return output

    def after_backward(self, chunk: int) -> list[nn.Parameter]:
        """The parameters that may have gradients after a backward pass or half of one."""
        return self._parameters[chunk]
