"""The reference: the same GPT and the same optimization in plain PyTorch.

There is no DeepSpeed here, there are no process groups and none of our layers. Weights come in as a dict of global
names, so that the reference starts where the layouts start. Everything is written the simplest way; nothing here is
shared with the code under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how."""

    num_layers: int = 3
    hidden_size: int = 32
    heads: int = 4
    vocab_size: int = 150  # no multiple of 256: the padded part differs with the tensor-parallel size
    sequence_length: int = 16
    micro_batch_size: int = 2
    global_batch_size: int = 8
    steps: int = 8
    learning_rate: float = 1.0e-2
    weight_decay: float = 0.1
    clip: float = 0.3  # active: the norm starts above it
    layernorm_epsilon: float = 1.0e-5
    tanh_gelu: bool = True
    label_smoothing: float = 0.0
    z_loss_coeff: float = 0.0
    width_ratio: float = 1.0  # of muP; with base heads of width 4


def batch_tokens(recipe: Recipe, step: int) -> torch.Tensor:
    """Token ids of one global batch, with some structure to learn. Shape: [global batch, s + 1]."""
    generator = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(0, recipe.vocab_size, (recipe.global_batch_size, 1), generator=generator)
    stride = torch.randint(1, 4, (recipe.global_batch_size, 1), generator=generator)
    return (start + stride * torch.arange(recipe.sequence_length + 1)) % recipe.vocab_size


def batch_mask(recipe: Recipe, step: int, uneven: bool) -> torch.Tensor:
    """Loss mask of one global batch; uneven masks count very different numbers of tokens per sample.

    Shape: [global batch, s].
    """
    mask = torch.ones(recipe.global_batch_size, recipe.sequence_length)
    if uneven:
        generator = torch.Generator().manual_seed(2000 + step)
        keep = torch.randint(1, recipe.sequence_length + 1, (recipe.global_batch_size, 1), generator=generator)
        mask = (torch.arange(recipe.sequence_length) < keep).float()
    return mask


def forward(
    weights: dict[str, torch.Tensor],
    tokens: torch.Tensor,
    recipe: Recipe,
    visible: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits of the network, causal and with consecutive positions unless told otherwise.

    Shapes: tokens and positions [b, s], visible [b, s, s] -> [b, s, vocabulary].
    """
    size, heads = recipe.hidden_size, recipe.heads
    batch, length = tokens.shape
    word = weights["embedding.word_embeddings.weight"]
    visible = torch.ones(batch, length, length).tril().bool() if visible is None else visible
    positions = torch.arange(length).expand(batch, -1) if positions is None else positions
    hidden = word[tokens] + weights["embedding.position_embeddings.weight"][positions]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (size,), weights[name + ".weight"], weights[name + ".bias"], recipe.layernorm_epsilon)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[name + ".weight"].T + weights[name + ".bias"]

    for layer in range(recipe.num_layers):
        prefix = f"decoder.layers.{layer}."
        mixed = linear(norm(hidden, prefix + "input_layernorm"), prefix + "self_attention.linear_qkv")
        mixed = mixed.view(batch, length, heads, 3, size // heads)
        query, key, value = (mixed[:, :, :, part].transpose(1, 2) for part in range(3))  # [b, a, s, d]
        head = size // heads
        scores = query @ key.transpose(-1, -2) * (head**-0.5 if recipe.width_ratio == 1 else 4**0.5 / head)
        scores = scores.masked_fill(~visible[:, None], float("-inf"))
        context = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, size)
        hidden = hidden + linear(context, prefix + "self_attention.linear_proj")
        inner = linear(norm(hidden, prefix + "pre_mlp_layernorm"), prefix + "mlp.linear_fc1")
        inner = F.gelu(inner, approximate="tanh" if recipe.tanh_gelu else "none")
        hidden = hidden + linear(inner, prefix + "mlp.linear_fc2")
    return norm(hidden, "decoder.final_layernorm") @ word.T / recipe.width_ratio


def train_reference(
    initial: dict[str, torch.Tensor], recipe: Recipe, *, uneven: bool = False, only_steps: Sequence[int] | None = None
) -> list[tuple[float, float]]:
    """Trains and returns (plain loss, gradient norm before clipping) of every step."""
    weights = {name: value.clone().requires_grad_() for name, value in initial.items()}
    inside = [w for name, w in weights.items() if w.dim() > 1 and "embeddings" not in name]
    tables = [w for name, w in weights.items() if w.dim() > 1 and "embeddings" in name]
    scaled = {"lr": recipe.learning_rate / recipe.width_ratio, "eps": 1.0e-8 / recipe.width_ratio}
    optimizer = torch.optim.AdamW(
        [
            {"params": inside, "weight_decay": recipe.weight_decay, **scaled},
            {"params": tables, "weight_decay": recipe.weight_decay},
            {"params": [w for w in weights.values() if w.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=recipe.learning_rate,
    )
    curve = []
    for step in only_steps or range(recipe.steps):
        tokens, mask = batch_tokens(recipe, step), batch_mask(recipe, step, uneven)
        logits = forward(weights, tokens[:, :-1], recipe)
        plain, smoothed = (
            F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none", label_smoothing=share)
            for share in (0.0, recipe.label_smoothing)
        )
        z_loss = recipe.z_loss_coeff * logits.logsumexp(-1).square()
        loss = (plain * mask).sum() / mask.sum()
        optimizer.zero_grad()
        (((smoothed + z_loss) * mask).sum() / mask.sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), recipe.clip)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve
