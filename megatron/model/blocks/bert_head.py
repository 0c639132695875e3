"""The heads of an encoder: logits of masked tokens, and of the order of a sample's segments."""

from __future__ import annotations

import torch
from torch import nn

from megatron.config import ModelConfig
from megatron.kernels.activations import activation
from megatron.kernels.products import linear
from megatron.model.blocks.embedding import OutputHead
from megatron.model.blocks.norm import build_norm
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import Dimension, ShardSpec, annotate
from megatron.parallel.tensor.collectives import gather_from

BertOutputs = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class BertHead(OutputHead):
    """Computes the logits of the predicted positions (all positions if the context has none), and with
    `--sentence-order-head` the two logits of the sentence order.

    About one position in seven is predicted, and the vocabulary's matrix is by far the widest of the network.

    Shapes: `[b, s, h]` to `[b, m, v/t]`, m = s without predicted positions; or to that and `[b, 2]`.

    Args:
        weight: the word embedding matrix that the head shares; None creates a separate matrix.

    Source: Devlin et al., "BERT", 2019, section 3.1; the heads as in NVIDIA Megatron-LM `megatron/model/bert_model.py`.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, weight: nn.Parameter | None = None) -> None:
        super().__init__(config, mesh, weight, bias=config.masked_lm_head)
        self.lm_head = MaskedTokenTransform(config, mesh) if config.masked_lm_head else None
        self.pooler = Pooler(config, mesh) if config.sentence_order_head else None
        self.binary_head = None
        if config.sentence_order_head:
            self.binary_head = ReplicatedLinear(config.hidden_size, 2, device=mesh.device)

    def forward(self, hidden: torch.Tensor, context: StepContext) -> BertOutputs:  # type: ignore[override]
        if context.splits_sequence:  # the rest is replicated
            hidden = gather_from(hidden, self.axis, dimension=1)
        selected = hidden if context.predicted is None else rows_at(hidden, context.predicted)  # [b, m, h]
        if self.lm_head is not None:
            selected = self.lm_head(selected)
        logits = self.logits(selected)
        if self.pooler is None or self.binary_head is None:
            return logits
        return logits, self.binary_head(self.pooler(hidden))


class MaskedTokenTransform(nn.Module):
    """Dense layer, activation and norm before the output matrix. Shapes: `[..., h]` to the same."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.dense = ReplicatedLinear(config.hidden_size, config.hidden_size, device=mesh.device)
        self.layer_norm = build_norm(config, mesh, config.hidden_size)
        self.activation, self.implementation = config.activation_function, mesh.kernels.activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        active = activation(self.dense(hidden), self.activation, implementation=self.implementation)
        return self.layer_norm(active)  # type: ignore[no-any-return]


class Pooler(nn.Module):
    """Dense layer and tanh over the first token. Shapes: `[b, s, h]` to `[b, h]`."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.dense = ReplicatedLinear(config.hidden_size, config.hidden_size, device=mesh.device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(hidden[:, 0]))


class ReplicatedLinear(nn.Module):
    """`y = x W^T + b`, computed by every tensor-parallel rank. Shapes: `[..., input]` to `[..., output]`."""

    def __init__(self, input_size: int, output_size: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        spec = ShardSpec((Dimension("output", output_size), Dimension("input", input_size)), is_matrix=True)
        self.weight = annotate(nn.Parameter(torch.zeros(spec.local_shape, device=device)), spec)
        self.bias = annotate(nn.Parameter(torch.zeros(output_size, device=device)), ShardSpec.vector(output_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def rows_at(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The hidden states at the given positions of each sample.

    Shapes: hidden `[b, s, h]`, positions `[b, m]` int64; result `[b, m, h]`.
    """
    return hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
