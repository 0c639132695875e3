"""Multi-token prediction: blocks after the network that predict tokens beyond the next one.

The input of the k-th block is, at every position, the output of the block before and the embedding of the token k
positions later; it predicts the token after that one. Word embedding and head are shared with the network. The states
of all depths pass through the head together, as further samples of the micro-batch.

Source: DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2, equations 21 to 23; names of the modules and the norm before the
head: NVIDIA Megatron-LM `megatron/core/transformer/multi_token_prediction.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config import ModelConfig
from megatron.model.blocks.embedding import WordEmbedding
from megatron.model.blocks.norm import build_hidden_norm
from megatron.model.blocks.transformer import TransformerBlock
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import Dimension
from megatron.parallel.tensor.collectives import gather_from, scatter_to
from megatron.parallel.tensor.layers import ColumnParallelLinear


class MultiTokenPrediction(nn.Module):
    """The blocks of all depths, as a layer between the last norm and the head.

    In training it appends the states of every depth to those of the network. Otherwise it does nothing; drafting calls
    its `layers` directly.

    Shapes: `[b, s/t, h]` to `[(1 + depths) b, s/t, h]`; weight `[v/t, h]`.

    Args:
        weight: the word embedding matrix, if it is on this rank; None creates a copy.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.embedding = WordEmbedding(config, mesh, weight)
        self.weight = self.embedding.weight
        depths = range(config.mtp_num_layers)
        self.layers = nn.ModuleList(PredictionLayer(config, mesh, config.num_layers + depth) for depth in depths)

    def forward(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Appends the states of the depths, in training.

        Raises:
            ValueError: the context has no tokens.
        """
        if not self.training:
            return hidden
        if context.tokens is None:
            raise ValueError("multi-token prediction requires StepSettings.has_tokens")
        states = [hidden]
        for depth, layer in enumerate(self.layers, start=1):
            later = F.pad(context.tokens[:, depth:], (0, depth))  # the last positions have no target
            states.append(layer(states[-1], self.embedding(later, context), context))
        return torch.cat(states)


class PredictionLayer(nn.Module):
    """One depth: projects the previous depth's states and the embeddings of later tokens, and runs a block.

    Shapes: states and embeddings `[b, s/t, h]` to the same.

    Args:
        index: index of its block, after the network's blocks.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, index: int) -> None:
        super().__init__()
        self.tp = mesh.tp
        self.enorm, self.hnorm = build_hidden_norm(config, mesh), build_hidden_norm(config, mesh)
        outputs = (Dimension("hidden", config.hidden_size, mesh.tp),)
        self.eh_proj = ColumnParallelLinear(2 * config.hidden_size, outputs, mesh.tp, bias=False, device=mesh.device)
        self.transformer_layer = TransformerBlock(config, mesh, index)
        self.final_layernorm = build_hidden_norm(config, mesh)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, context: StepContext) -> torch.Tensor:
        joined = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)  # [b, s/t, 2h]
        splits = context.splits_sequence
        projected = gather_from(self.eh_proj(joined, splits_sequence=splits), self.tp)  # [b, s, h]
        local = scatter_to(projected, self.tp, dimension=1) if splits else projected
        return self.final_layernorm(self.transformer_layer(local, context))  # type: ignore[no-any-return]
