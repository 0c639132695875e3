"""A network of Llama's kind in plain PyTorch, as one writes it by hand: a baseline of `train_cpu.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from megatron.config import ModelConfig


class Block(nn.Module):
    """A block with RMS norms, rotary positions, grouped keys and values, and a gated feed-forward layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.size = config.hidden_size, config.kv_channels
        self.heads, self.groups = config.num_attention_heads, config.num_query_groups
        eps, rows = config.layernorm_epsilon, (self.heads + 2 * self.groups) * self.size
        self.norm1, self.norm2 = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.qkv, self.projection = nn.Linear(width, rows, bias=False), nn.Linear(width, width, bias=False)
        self.fc1 = nn.Linear(width, 2 * config.ffn_hidden_size, bias=False)
        self.fc2 = nn.Linear(config.ffn_hidden_size, width, bias=False)
        self.dropout, self.attention_dropout = config.hidden_dropout, config.attention_dropout

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """Shapes: x `[b, s, h]` to the same; cosine and sine `[s, d]`."""
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, -1, self.size).transpose(1, 2)
        query, key, value = heads.split([self.heads, self.groups, self.groups], dim=1)
        query, key = (part * cosine + turned(part) * sine for part in (query, key))
        probability = self.attention_dropout if self.training else 0.0
        context = F.scaled_dot_product_attention(
            query, key, value, dropout_p=probability, is_causal=True, enable_gqa=True
        )
        attended = self.projection(context.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(attended, self.dropout, self.training)
        gate, up = self.fc1(self.norm2(x)).chunk(2, dim=-1)
        return x + F.dropout(self.fc2(F.silu(gate) * up), self.dropout, self.training)


class PlainLlama(nn.Module):
    """A decoder with an output matrix of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.dropout = config.hidden_dropout
        self.head = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.init_method_std)
        size = config.kv_channels
        frequencies = config.rotary_base ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(config.max_position_embeddings), frequencies).repeat(1, 2)  # [s, d]
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shapes: tokens `[b, s]` to logits `[b, s, v]`."""
        x, length = F.dropout(self.words(tokens), self.dropout, self.training), tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cosine[:length], self.sine[:length])
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def turned(x: torch.Tensor) -> torch.Tensor:
    """The channel pairs (i, i + d/2) turned by a right angle. Shapes: `[..., d]` to the same."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
