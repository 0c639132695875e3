"""A forward pass through all pipeline stages of a loaded network."""

from __future__ import annotations

import torch

from megatron.inference.loading import LoadedModel
from megatron.model.interface.network import LayerKind
from megatron.model.interface.step_context import StepContext
from megatron.parallel.messages import receive, send


class Forward:
    """Runs the network of `open_checkpoint`; each rank of the pipeline axis holds one of its stages.

    Hidden states are the only thing that travels; every rank makes the same context, and only its own stage's keys and
    values are in it.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._model, self._pipeline = loaded.model, loaded.mesh.pp
        self._hidden_size = loaded.config.model.hidden_size
        self._first_weight = next(loaded.model.parameters())

    def __call__(
        self, inputs: torch.Tensor, context: StepContext, rows: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Returns the outputs on the last stage, None on the others; collective over the ranks of one model copy.

        Shapes: inputs `[b, s]` int64, equal on all ranks; rows `[n]` int64; result `[b, s, v/t]`, or `[n, v/t]`.

        Args:
            rows: the positions whose outputs are wanted, as indices into `[b * s]`; None for all. A head is the widest
                layer by far.
        """
        stage, last = self._pipeline.rank, self._pipeline.size - 1
        hidden = inputs
        if stage > 0:
            like = self._first_weight
            hidden = torch.empty(*inputs.shape, self._hidden_size, dtype=like.dtype, device=like.device)
            receive(hidden, self._pipeline, stage - 1)
        is_whole = True
        for spec, layer in self._model.named_layers():
            if rows is not None and is_whole and spec.kind in (LayerKind.NORM, LayerKind.HEAD):
                hidden, is_whole = hidden.flatten(0, 1)[rows], False  # [n, h]
            hidden = layer(hidden, context)
        if stage < last:
            send(hidden, self._pipeline, stage + 1)
            return None
        return hidden
