"""The quickstart's model in plain PyTorch, optimized for speed: a baseline of `train_cpu.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from megatron.config import ModelConfig


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.dropout, self.attention_dropout = config.hidden_dropout, config.attention_dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: `[b, s, h]` to the same."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # [b, a, s, d]
        probability = self.attention_dropout if self.training else 0.0
        context = F.scaled_dot_product_attention(query, key, value, dropout_p=probability, is_causal=True)
        attended = self.projection(context.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(attended, self.dropout, self.training)
        transformed = self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(transformed, self.dropout, self.training)


class PlainGPT(nn.Module):
    """GPT with learned positions and a tied head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm, self.dropout = nn.LayerNorm(config.hidden_size), config.hidden_dropout
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.init_method_std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shapes: tokens `[b, s]` to logits `[b, s, v]`."""
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)
