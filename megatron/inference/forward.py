"""Forward passes through all pipeline stages of a loaded network, and decisions based on its scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.errors import NumericsError
from megatron.inference.loaded_model import LoadedModel
from megatron.model.gpt import whole_logits
from megatron.model.interface.network import LayerKind
from megatron.model.interface.step_context import StepContext
from megatron.parallel.messages import broadcast_json, receive, send


class Forward:
    """Runs the network of `open_checkpoint`; each rank of the pipeline axis holds one of its stages.

    Ranks exchange only hidden states; each builds the same context, with the keys and values of its own stage.

    Args:
        keeps_states: keep the hidden states of all tokens, for multi-token prediction.

    Attributes:
        states: hidden states `[b, s, h]` of the latest pass on the last stage; None if they are not kept.
    """

    def __init__(self, loaded: LoadedModel, *, keeps_states: bool = False) -> None:
        self.states: torch.Tensor | None = None
        self._keeps_states = keeps_states
        self._of_rows = {LayerKind.HEAD} if keeps_states else {LayerKind.NORM, LayerKind.HEAD}
        self._model, self._pipeline = loaded.model, loaded.mesh.pp
        self._hidden_size = loaded.config.model.hidden_size
        self._first_weight = next(loaded.model.parameters())

    def __call__(
        self, inputs: torch.Tensor, context: StepContext, rows: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Returns the outputs on the last stage, None on the others; collective over the ranks of one model copy.

        Shapes: inputs `[b, s]` int64, equal on all ranks; rows `[n]` int64; result `[b, s, v/t]`, or `[n, v/t]`.

        Args:
            rows: the positions to compute outputs of, as indices into `[b * s]`; None for all. The head is by far the
                widest layer.
        """
        stage, last = self._pipeline.rank, self._pipeline.size - 1
        hidden = inputs
        if stage > 0:
            like = self._first_weight
            hidden = torch.empty(*inputs.shape, self._hidden_size, dtype=like.dtype, device=like.device)
            receive(hidden, self._pipeline, stage - 1)
        is_whole = True
        for spec, layer in self._model.named_layers():
            if rows is not None and is_whole and spec.kind in self._of_rows:
                hidden, is_whole = hidden.flatten(0, 1)[rows], False  # [n, h]
            if self._keeps_states and spec.kind is LayerKind.MULTI_TOKEN:
                self.states = hidden
            hidden = layer(hidden, context)
        if stage < last:
            send(hidden, self._pipeline, stage + 1)
            return None
        return hidden


def decide_on_all(scores: torch.Tensor | None, loaded: LoadedModel, decide: Callable[[torch.Tensor], Any]) -> Any:
    """Calls `decide` with the scores of the whole vocabulary on the last stage's first rank; returns its result on all
    ranks of the model.

    Shapes: scores `[n, v/t]` on the last stage, None on the others; `decide` takes `[n, v]` float32 on the CPU.

    Args:
        decide: must return JSON values.

    Raises:
        NumericsError: `decide` raised it; on all ranks.
    """
    mesh = loaded.mesh
    answer: dict[str, Any] = {}
    if scores is not None:
        whole = whole_logits(scores, mesh.tp, loaded.vocab_size)  # [n, v]
        if mesh.tp.rank == 0:
            whole = whole.to("cpu", torch.float32)  # not in `decide`: a device failure must not fail single rows
            try:
                answer["decision"] = decide(whole)
            except NumericsError as failure:
                answer["failure"] = str(failure)
    if mesh.model.size > 1:
        answer = broadcast_json(answer, mesh.model, source=(mesh.pp.size - 1) * mesh.tp.size)
    if "failure" in answer:
        raise NumericsError(answer["failure"])
    return answer["decision"]
