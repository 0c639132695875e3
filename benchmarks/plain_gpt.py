"""The quickstart's model in plain PyTorch, optimized for speed: the baseline of `train_cpu.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from megatron.config import ModelConfig, OptimConfig
    from megatron.data.loader import Batch


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: `[b, s, h]` to the same."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # [b, a, s, d]
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(context.transpose(1, 2).reshape(batch, length, width))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT with learned positions and a tied head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.init_method_std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shapes: tokens `[b, s]` to logits `[b, s, v]`."""
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)


class PlainTraining:
    """A plain training loop: AdamW with two parameter groups, gradient accumulation, clipping."""

    def __init__(self, config: ModelConfig, optim: OptimConfig) -> None:
        self.model = PlainGPT(config)
        self.clip = optim.clip_grad
        weights = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": optim.weight_decay},
                {"params": [weight for weight in weights if weight.dim() <= 1], "weight_decay": 0.0},
            ],
            betas=(optim.adam_beta1, optim.adam_beta2),
            eps=optim.adam_eps,
            fused=True,
        )

    def step(self, batches: Sequence[Batch], learning_rate: float) -> float:
        """One optimizer step on the micro-batches; returns the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        total = 0.0
        for batch in batches:
            tokens, labels = torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)
            loss = F.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten()) / len(batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total
