"""Token ids to hidden states and back: the word table, the position table, and the tied head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config import ModelConfig
from megatron.errors import DataError
from megatron.model.transformer import EMBEDDING_DROPOUT
from megatron.parallel.collectives import copy_to
from megatron.parallel.layers import LayerNorm, VocabParallelEmbedding
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.placement import Placement, place
from megatron.parallel.rng import hidden_dropout


class WordEmbedding(VocabParallelEmbedding):
    """The first layer, and the only weight of the tied head.

    Shapes: `(tokens [b, s], sample_ids [b][, segment_ids [b, s]])` to `(hidden [b, s, h], ...)`.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__(config.vocab_size, config.padded_vocab_size, config.hidden_size, mesh.tp, device=mesh.device)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """Looks the tokens up."""
        tokens, *rest = inputs
        return (self.embed(tokens), *rest)


class PositionEmbedding(nn.Module):
    """Adds a learned vector per position, then drops out.

    Shapes: `(hidden [b, s, h], sample_ids [b][, segment_ids [b, s]])` to the same; weight `[positions, h]`, replicated.

    Args:
        restart: number the positions from 0 in every segment (`--reset-position-ids`).
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, *, seed: int, restart: bool = False) -> None:
        super().__init__()
        shape = (config.max_position_embeddings, config.hidden_size)
        self.weight = place(nn.Parameter(torch.zeros(shape, device=mesh.device)), Placement.whole(shape))
        self.seed, self.dropout, self.restart = seed, config.hidden_dropout, restart

    def forward(self, inputs: tuple[torch.Tensor, ...], offset: int = 0) -> tuple[torch.Tensor, ...]:
        """Adds the positions; the first token of the input is number `offset` of its sequence.

        Raises:
            DataError: the sequence is longer than the table.
        """
        hidden, sample_ids, *rest = inputs
        last = offset + hidden.shape[1]
        if last > self.weight.shape[0]:
            raise DataError(
                f"The sequence has {last} tokens and there are {self.weight.shape[0]} positions "
                f"(--max-position-embeddings {self.weight.shape[0]}). Shorten the text, or train with more positions."
            )
        if self.restart and rest:
            vectors = F.embedding(restarted_positions(rest[0]), self.weight)  # [b, s, h]
        else:
            vectors = self.weight[offset:last]  # [s, h]
        hidden = hidden_dropout(
            hidden + vectors,
            self.dropout,
            seed=self.seed,
            layer=EMBEDDING_DROPOUT,
            sample_ids=sample_ids,
            training=self.training,
        )
        return (hidden, sample_ids, *rest)


class FinalLayerNorm(LayerNorm):
    """The layer norm after the last block, from one tuple to the next."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__(config.hidden_size, config.layernorm_epsilon, device=mesh.device)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """Normalises the hidden states."""
        hidden, *rest = inputs
        return (super().forward(hidden), *rest)


def word_logits(module: VocabParallelEmbedding, hidden: torch.Tensor) -> torch.Tensor:
    """The tied head: a score for every row of the word table that this rank holds, padding included (score 0).

    Shapes: `[b, s, h]` to `[b, s, v/t]`.
    """
    return F.linear(copy_to(hidden, module.axis), module.weight)


def restarted_positions(segment_ids: torch.Tensor) -> torch.Tensor:
    """Positions that begin at 0 where a new segment does.

    Shapes: `[b, s]` to `[b, s]` int64.
    """
    index = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand_as(segment_ids)
    begins = torch.zeros_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return index - torch.where(begins, index, 0).cummax(dim=1).values
