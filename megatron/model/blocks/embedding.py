"""Embeddings and output head: token ids to hidden states, and hidden states to logits."""

from __future__ import annotations

import torch
from torch import nn

from megatron.config import ModelConfig
from megatron.errors import DataError
from megatron.kernels.dropout_add import dropout_add
from megatron.kernels.embedding import lookup
from megatron.kernels.softcap import softcapped
from megatron.model.blocks.dropout import EMBEDDING_SITE, DropoutSite, dropout_at
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.shard_spec import Dimension, ShardSpec, annotate
from megatron.parallel.tensor.collectives import gather_sequence, gathered_tokens
from megatron.parallel.tensor.head_loss import FactoredLogits
from megatron.parallel.tensor.layers import VocabParallelEmbedding, vocabulary_table
from megatron.parallel.tensor.linear import column_linear


class WordEmbedding(VocabParallelEmbedding):
    """The first layer of the network: token embeddings, scaled by `--embedding-multiplier`.

    The factor is rounded to the dtype of the weights, as in Gemma's reference code.

    Shapes: tokens `[b, s]` int64 to `[b, s, h]`.

    Args:
        weight: the matrix of another layer to share; None creates one.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, weight: nn.Parameter | None = None) -> None:
        super().__init__(
            config.vocab_size,
            config.padded_vocab_size,
            config.hidden_size,
            mesh.tp,
            device=mesh.device,
            implementation=mesh.kernels.embedding,
            weight=weight,
        )
        self.multiplier = config.embedding_multiplier

    def forward(self, tokens: torch.Tensor, context: StepContext) -> torch.Tensor:  # type: ignore[override]
        hidden = self.embed(tokens, splits_sequence=context.splits_sequence)
        return hidden if self.multiplier == 1 else hidden * torch.tensor(self.multiplier, dtype=hidden.dtype)


class PositionEmbedding(nn.Module):
    """Adds a learned vector per position, then applies dropout.

    Shapes: `[b, s, h]` to the same; weight `[positions, h]`, replicated.

    Args:
        dropout: probability of dropout; None for the configured one.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, dropout: float | None = None) -> None:
        super().__init__()
        shape = (config.max_position_embeddings, config.hidden_size)
        dimensions = (Dimension("positions", shape[0]), Dimension("hidden", shape[1]))
        spec = ShardSpec(dimensions, is_matrix=True, summed_over=(mesh.sequence_parallel,))
        self.weight = annotate(nn.Parameter(torch.zeros(shape, device=mesh.device)), spec)
        self.positions = shape[0]
        self.dropout = config.hidden_dropout if dropout is None else dropout
        self.site, self.dropout_kernel = DropoutSite(EMBEDDING_SITE), mesh.kernels.dropout_add
        self.lookup_kernel = mesh.kernels.embedding

    def forward(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Adds the position embeddings.

        Raises:
            DataError: the sequence is longer than the table.
        """
        length = hidden.shape[1]
        last = context.positions_needed(length * context.sequence_parallel.size)
        if last > self.positions:
            raise DataError(
                f"The sequence has {last} tokens, but the model has {self.positions} positions "
                f"(--max-position-embeddings {self.positions}). Shorten the text, or train with more positions."
            )
        ids = context.position_ids
        positions = context.hidden_positions(length) if ids is None else context.local_tokens(ids)
        if positions is not None:
            vectors = lookup(self.weight, positions, implementation=self.lookup_kernel)  # [b, s/t, h] or [s/t, h]
        else:
            vectors = self.weight.narrow(0, context.first_position(length), length)  # [s/t, h]
        return _drop(hidden + vectors, self, context)


class TokenTypeEmbedding(nn.Module):
    """Adds a learned vector per token type; tokens are of type 0 if the context has no types.

    Shapes: `[b, s, h]` to the same; weight `[types, h]`, replicated.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        shape = (config.token_types, config.hidden_size)
        dimensions = (Dimension("token types", shape[0]), Dimension("hidden", shape[1]))
        spec = ShardSpec(dimensions, is_matrix=True, summed_over=(mesh.sequence_parallel,))
        self.weight = annotate(nn.Parameter(torch.zeros(shape, device=mesh.device)), spec)
        self.lookup_kernel = mesh.kernels.embedding

    def forward(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        types = context.token_types
        if types is None:
            return hidden + self.weight[0]
        return hidden + lookup(self.weight, context.local_tokens(types), implementation=self.lookup_kernel)


class EmbeddingDropout(nn.Module):
    """Dropout of the embedding as a separate layer: without learned positions, or after a norm of the embedding.

    Shapes: `[b, s, h]` to the same.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.dropout, self.dropout_kernel = config.hidden_dropout, mesh.kernels.dropout_add
        self.site = DropoutSite(EMBEDDING_SITE)

    def forward(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        return _drop(hidden, self, context)


class OutputHead(nn.Module):
    """Computes the logits of this rank's vocabulary rows, including padding rows, whose logits are 0.

    With sequence parallelism the tokens of all ranks are gathered, since each rank has only a part of the vocabulary.
    With `context.factored_logits` the factors of the logits are returned; `head_losses` computes the losses from them.

    Shapes: `[b, s, h]` to `[b, s, v/t]`; weight `[v/t, h]`, bias `[v/t]`.

    Args:
        weight: the word embedding matrix that the head shares; None creates a separate matrix.
        bias: add a bias per entry of the vocabulary.
    """

    def __init__(
        self, config: ModelConfig, mesh: ParallelMesh, weight: nn.Parameter | None = None, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.axis = mesh.tp
        self.multiplier, self.softcap = config.logit_multiplier, config.output_logit_softcap
        self.packed: torch.Tensor | None = None  # a tied weight as prepared by `products.packed`
        self.weight = weight
        if weight is None:
            self.weight = vocabulary_table(
                config.vocab_size,
                config.padded_vocab_size,
                config.hidden_size,
                mesh.tp,
                mesh.device,
            )
        self.bias = None
        if bias:
            rows = Dimension("rows of the padded vocabulary", config.vocab_size, mesh.tp, config.padded_vocab_size)
            spec = ShardSpec((rows,))
            self.bias = annotate(nn.Parameter(torch.zeros(spec.local_shape, device=mesh.device)), spec)

    def forward(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor | FactoredLogits:
        if not context.factored_logits:
            return self._product(hidden, context.splits_sequence)
        # A view of the weight: DeepSpeed prepares for backward in hooks on computed outputs, and must have done so
        # before a gradient reaches the parameter.
        weight: torch.Tensor = self.weight  # type: ignore[assignment]
        scaled = self._scaled(hidden)
        whole = gathered_tokens(scaled.detach(), self.axis) if context.splits_sequence else scaled
        return FactoredLogits(whole, weight.view_as(weight), self.softcap, source=scaled)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes the logits of replicated tokens. Shapes: `[b, s, h]` to `[b, s, v/t]`."""
        return self._product(hidden, splits_sequence=False)

    def _product(self, hidden: torch.Tensor, splits_sequence: bool) -> torch.Tensor:
        hidden, axis = self._scaled(hidden), self.axis
        if splits_sequence:
            hidden, axis = gather_sequence(hidden, axis), Axis.single("tp")  # gathering sums the gradient
        logits = column_linear(hidden, self.weight if self.packed is None else self.packed, self.bias, axis)  # type: ignore[arg-type]
        return logits if self.softcap is None else softcapped(logits, self.softcap)

    def _scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.multiplier == 1 else hidden * self.multiplier


def _drop(hidden: torch.Tensor, layer: PositionEmbedding | EmbeddingDropout, context: StepContext) -> torch.Tensor:
    dropout = dropout_at(layer.site, layer.dropout, hidden, context) if layer.training else None
    if dropout is None:
        return hidden
    return dropout_add(hidden, dropout, implementation=layer.dropout_kernel)
