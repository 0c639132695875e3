"""The reference of the encoder: BERT, its two losses and their optimization in plain PyTorch.

Weights come in as a dict of global names. Nothing here is shared with the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tests.parity.reference import Recipe

Weights = Mapping[str, torch.Tensor]


class MaskedText(NamedTuple):
    """Samples of masked text, of which every one ends with some padding.

    Shapes: tokens, labels, types and segments `[b, s]`, predicted `[b, m]`, swapped `[b]`, all int64; mask `[b, s]`.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    types: torch.Tensor
    segments: torch.Tensor
    predicted: torch.Tensor
    swapped: torch.Tensor


def masked_text(recipe: Recipe, step: int, most: int = 4) -> MaskedText:
    """A global batch whose samples have very different numbers of masked tokens."""
    generator = torch.Generator().manual_seed(3000 + step)

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    count, length = recipe.global_batch_size, recipe.sequence_length
    places = torch.arange(length)
    labels = (drawn(0, recipe.vocab_size, count, 1) + drawn(1, 4, count, 1) * places) % recipe.vocab_size
    ends, parts = drawn(most + 2, length + 1, count, 1), drawn(2, most + 1, count, 1)
    predicted, mask = torch.zeros(count, most, dtype=torch.int64), torch.zeros(count, length)
    for row, (end, number) in enumerate(zip(ends.flatten().tolist(), drawn(1, most + 1, count).tolist(), strict=True)):
        chosen = (torch.randperm(end - 1, generator=generator)[:number] + 1).sort().values
        predicted[row, :number], mask[row, chosen] = chosen, 1.0
    tokens = torch.where(mask > 0, 3, labels)
    order = drawn(0, 2, count)
    tokens[:, 0] = order  # so that there is something to learn
    return MaskedText(tokens, labels, mask, (places >= parts).long(), (places >= ends).long(), predicted, order)


def encode(weights: Weights, text: MaskedText, recipe: Recipe, *, post: bool) -> torch.Tensor:
    """The hidden states after the last block and its norm.

    Shapes: result `[b, s, h]`.

    Args:
        post: norms after the residual additions and after the embeddings, as in the original BERT.
    """
    size, heads, length = recipe.hidden_size, recipe.heads, text.tokens.shape[1]
    norm, linear = _layers(weights, recipe)
    hidden = weights["embedding.word_embeddings.weight"][text.tokens]
    hidden = hidden + weights["embedding.position_embeddings.weight"][torch.arange(length)]
    hidden = hidden + weights["embedding.tokentype_embeddings.weight"][text.types]
    if post:
        hidden = norm(hidden, "embedding.layernorm")
    visible = text.segments[:, :, None] == text.segments[:, None]  # [b, s, s]

    def attended(x: torch.Tensor, prefix: str) -> torch.Tensor:
        mixed = linear(x, prefix + "linear_qkv").view(*x.shape[:2], heads, 3, size // heads)
        query, key, value = (mixed[:, :, :, part].transpose(1, 2) for part in range(3))  # [b, a, s, d]
        scores = (query @ key.transpose(-1, -2)) * (size // heads) ** -0.5
        shares = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
        return linear((shares @ value).transpose(1, 2).flatten(2), prefix + "linear_proj")

    def fed(x: torch.Tensor, prefix: str) -> torch.Tensor:
        return linear(F.gelu(linear(x, prefix + "linear_fc1"), approximate="tanh"), prefix + "linear_fc2")

    for layer in range(recipe.num_layers):
        at = f"decoder.layers.{layer}."
        if post:
            hidden = norm(hidden + attended(hidden, at + "self_attention."), at + "post_self_attn_layernorm")
            hidden = norm(hidden + fed(hidden, at + "mlp."), at + "post_mlp_layernorm")
        else:
            hidden = hidden + attended(norm(hidden, at + "input_layernorm"), at + "self_attention.")
            hidden = hidden + fed(norm(hidden, at + "pre_mlp_layernorm"), at + "mlp.")
    return hidden if post else norm(hidden, "decoder.final_layernorm")


def predict(weights: Weights, hidden: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all positions, and of the sentence order. Shapes: `[b, s, v]` and `[b, 2]`."""
    norm, linear = _layers(weights, recipe)
    inner = F.gelu(linear(hidden, "output_layer.lm_head.dense"), approximate="tanh")
    logits = norm(inner, "output_layer.lm_head.layer_norm") @ weights["embedding.word_embeddings.weight"].T
    pooled = torch.tanh(linear(hidden[:, 0], "output_layer.pooler.dense"))
    return logits + weights["output_layer.bias"], linear(pooled, "output_layer.binary_head")


def train_plain_bert(initial: Weights, recipe: Recipe, *, post: bool) -> list[tuple[float, float, float]]:
    """Trains and returns (masked loss, sentence-order loss, gradient norm before clipping) of every step."""
    weights = {name: value.clone().requires_grad_() for name, value in initial.items()}
    groups = [
        {"params": [w for w in weights.values() if w.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [w for w in weights.values() if w.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer, curve = torch.optim.AdamW(groups, lr=recipe.learning_rate), []
    for step in range(recipe.steps):
        text = masked_text(recipe, step)
        logits, order_logits = predict(weights, encode(weights, text, recipe, post=post), recipe)
        losses = F.cross_entropy(logits.transpose(1, 2), text.labels, reduction="none") * text.mask
        masked, order = losses.sum() / text.mask.sum(), F.cross_entropy(order_logits, text.swapped)
        optimizer.zero_grad()
        (masked + order).backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), recipe.clip)
        optimizer.step()
        curve.append((masked.item(), order.item(), norm.item()))
    return curve


def _layers(weights: Weights, recipe: Recipe) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        shape = (recipe.hidden_size,)
        return F.layer_norm(x, shape, weights[name + ".weight"], weights[name + ".bias"], recipe.layernorm_epsilon)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[name + ".weight"].T + weights[name + ".bias"]

    return norm, linear
