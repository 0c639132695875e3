"""Latent attention against a plain computation of it, and what its cache holds."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F

from megatron.model.blocks.attention import SelfAttention
from megatron.model.blocks.attention_forms.latent import CachedLatentAttention
from megatron.model.interface.key_value_cache import MixedCaches, TextCache
from megatron.model.interface.step_context import StepContext, StepSettings
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.networks import tiny_config

PLAIN, ROTATED, VALUES, LATENT, QUERIES, LENGTH = 8, 4, 10, 12, 20, 7
FIELDS = {
    "multi_latent_attention": True, "q_lora_rank": QUERIES, "kv_lora_rank": LATENT, "qk_head_dim": PLAIN,
    "qk_pos_emb_head_dim": ROTATED, "v_head_dim": VALUES, "qk_layernorm": True, "normalization": "RMSNorm",
    "position_embedding_type": "rope", "attention_dropout": 0.0, "latent_layernorm_epsilon": 0.5,
}  # fmt: skip


def built() -> SelfAttention:
    attention = SelfAttention(tiny_config(**FIELDS), ParallelMesh.single(), 0)
    drawn = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=drawn) * 0.3)
    return attention.eval()


def hidden_states(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, LENGTH, 32, generator=torch.Generator().manual_seed(4))


def context_of(batch: int, **changes: object) -> StepContext:
    return StepSettings().context(torch.arange(batch), **changes)  # type: ignore[arg-type]


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Halves rotated by the position. Shapes: `[b, a, s, r]` to the same."""
    angles = torch.arange(LENGTH).unsqueeze(1) * 10000.0 ** (-torch.arange(0, ROTATED, 2) / ROTATED)
    return torch.view_as_real(torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones(()), angles)).mT.flatten(-2)


def plain_attention(attention: SelfAttention, hidden: torch.Tensor) -> torch.Tensor:
    """The paper's equations 37 to 47, one head after another."""
    values = dict(attention.named_parameters())
    values |= {f"linear_out_proj.{kind}": values[f"linear_proj.{kind}"] for kind in ("weight", "bias")}

    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = values.get(f"linear_{name}_proj.bias")
        return x @ values[f"linear_{name}_proj.weight"].T + (0 if bias is None else bias)

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], values[f"{name}_layernorm.weight"], eps=0.5)

    queries = product(normed(product(hidden, "q_down"), "q"), "q_up").chunk(4, -1)
    latent, shared = product(hidden, "kv_down").split([LATENT, ROTATED], -1)
    heads = product(normed(latent, "kv"), "kv_up").chunk(4, -1)
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    outputs = []
    for query, head in zip(queries, heads, strict=True):
        key, value = head.split([PLAIN, VALUES], -1)
        scores = query[..., :PLAIN] @ key.mT + rotated(query[..., PLAIN:]) @ rotated(shared).mT
        scores = (scores / math.sqrt(PLAIN + ROTATED)).masked_fill(later, float("-inf"))
        outputs.append(scores.softmax(-1) @ value)
    return product(torch.cat(outputs, -1), "out")


def test_it_is_the_papers_attention() -> None:
    attention, hidden = built(), hidden_states()
    torch.testing.assert_close(
        attention(hidden, context_of(2)), plain_attention(attention, hidden), rtol=1e-4, atol=1e-5
    )


def test_a_cache_holds_the_latent_and_the_shared_key_of_a_token() -> None:
    attention, hidden = built(), hidden_states(1)
    form = attention.cached_form
    assert isinstance(form, CachedLatentAttention)
    assert [form.expands(queries, LENGTH) for queries in (LENGTH, 1)] == [True, False]
    whole = attention(hidden, context_of(1))
    for steps in ([LENGTH], [LENGTH - 1, 1]):  # keys and values are made of the latents, or queries brought to these
        text, pieces = TextCache(block_tokens=LENGTH), []
        for step in steps:
            caches, first = MixedCaches([text], [step]), text.length
            positions = torch.arange(first, first + step).unsqueeze(0)
            context = dataclasses.replace(context_of(1, caches=caches), position_ids=positions)
            pieces.append(attention(hidden[:, first : first + step], context))
            caches.advance()
        assert text.allocated_bytes == LENGTH * (LATENT + ROTATED) * 4
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-5)
