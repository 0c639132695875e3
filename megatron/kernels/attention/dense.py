"""Softmax attention with grouped keys and values, biases, causal masks, soft-caps and dropout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.kernels.attention.softmax import scaled_softmax
from megatron.kernels.choice import TORCH_KERNELS, Implementation, Kernels
from megatron.kernels.dropout_add import Dropout, dropout_add
from megatron.kernels.products import batched_product, needs_widening

LONGEST_EXPLICIT = 512  # tokens
FEWEST_WIDE_QUERIES = 64  # with fewer, converting keys and values takes longer than attending to them
_CUDNN_TILE = 128  # keys


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    softcap: float | None = None,
    kernels: Kernels = TORCH_KERNELS,
) -> torch.Tensor:
    """Softmax attention with the softmax in float32; the result is 0 for a query without visible keys.

    Each of the g heads of keys and values serves a/g consecutive heads of queries. For `causal`, the queries are the
    last s of the k positions; a causal mask and a bias both apply.

    Shapes: query `[b, a, s, d]`, key and value `[b, g, k, d]`, bias `[b or 1, 1 or a, s or 1, k]` in the query's dtype
    or float32, added to the scaled scores; result as query.

    Args:
        softcap: scores become `softcap * tanh(score / softcap)` before the bias; no fused kernel does this.

    Source: Vaswani et al., "Attention is all you need", 2017, equation 1; Gemma Team, "Gemma 2", 2024, section 2
    (soft-cap).
    """
    if query.shape[2] >= FEWEST_WIDE_QUERIES and needs_widening(query):
        wide, wide_bias = (query.float(), key.float(), value.float()), None if bias is None else bias.float()
        options = {"causal": causal, "dropout": dropout, "softcap": softcap}
        return attention(*wide, scale, bias=wide_bias, kernels=kernels, **options).to(query.dtype)  # type: ignore[arg-type]
    if softcap is not None:
        drop = _dropout(dropout) if dropout else None
        return explicit_attention(
            query, key, value, scale, drop, bias=bias, causal=causal, softcap=softcap, kernels=kernels
        )
    grouped = query.shape[1] != key.shape[1]
    if grouped and causal and bias is None and _explicit_is_faster(query, key, dropout):
        return explicit_attention(query, key, value, scale, causal=True, kernels=kernels)
    if causal and (bias is not None or query.shape[2] != key.shape[2]):
        bias, causal = _with_causal_mask(bias, query, key), False
    if bias is not None and query.device.type != "cpu":
        bias = bias.to(query.dtype)  # GPU kernels reject another dtype, or misread it as the query's
        if grouped:  # the fused kernels with a bias require as many heads of keys
            key, value, grouped = repeated_heads(key, query.shape[1]), repeated_heads(value, query.shape[1]), False
    form: dict[str, Any] = {"dropout_p": dropout, "is_causal": causal, "scale": scale, "enable_gqa": grouped}
    if bias is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=None, **form)
    with _sound_kernels(key):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, **form)


def repeated_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeats every head of keys or values for each of the query heads that it serves.

    Shapes: `[b, g, k, d]` to `[b, heads, k, d]`.
    """
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def explicit_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    drop: Callable[[torch.Tensor], torch.Tensor] | None = None,
    *,
    dropout: Dropout | None = None,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
    kernels: Kernels = TORCH_KERNELS,
) -> torch.Tensor:
    """`attention` with materialized probabilities; applies `dropout` or `drop` to them.

    Used for soft-caps and for dropout on CPUs, where torch's fused attention lacks dropout and its fallback, which
    draws random numbers serially, takes about twice as long.

    Shapes: as in `attention`; `drop` maps `[b, a, s, k]` to the same, rows of `dropout` are `[b, a, s]`.

    Args:
        dropout: stateless dropout; the compiled softmax applies it in its own pass.
        drop: any other dropout.
    """
    if kernels.softmax is Implementation.CSRC and (dropout is None or not dropout.is_traced):
        return _with_compiled_softmax(query, key, value, scale, drop, dropout, bias, causal, softcap)
    if dropout is not None:
        drop = partial(dropout_add, dropout=dropout, implementation=kernels.dropout_add)
    may_see_nothing = bias is not None
    if causal and query.shape[2] > 1:
        bias = _with_causal_mask(bias, query, key)
    batch, heads, length, _ = query.shape
    flat_query, flat_key, flat_value = _flat(query, key, value)
    is_hidden = None
    if bias is not None and may_see_nothing:
        is_hidden = bias.amax(dim=-1, keepdim=True) == float("-inf")  # [b or 1, 1 or a, s or 1, 1]
        bias = bias.masked_fill(is_hidden, 0.0)
    scores = _scores(flat_query, flat_key, scale, bias, (batch, heads, length, -1), softcap)
    probabilities = scores.softmax(dim=-1).to(query.dtype)
    if drop is not None:
        probabilities = drop(probabilities)
    attended = batched_product(probabilities.view(*flat_query.shape[:2], -1), flat_value)  # [b*g, a/g*s, d]
    attended = attended.view(query.shape)
    return attended if is_hidden is None else attended.masked_fill(is_hidden, 0.0)


def _with_compiled_softmax(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    drop: Callable[[torch.Tensor], torch.Tensor] | None,
    dropout: Dropout | None,
    bias: torch.Tensor | None,
    causal: bool,
    softcap: float | None,
) -> torch.Tensor:
    """`explicit_attention` with scale, causal mask, bias, softmax and dropout in one operation.

    No mask is materialized. Queries in float16 are scaled before the product, which might overflow otherwise.
    """
    batch, heads, length, _ = query.shape
    before = scale if query.dtype == torch.float16 else 1.0
    after = scale / before
    if softcap is not None:
        before, after = scale / softcap, softcap
    flat_query, flat_key, flat_value = _flat(query, key, value)
    scores = batched_product(flat_query if before == 1 else flat_query * before, flat_key.transpose(1, 2))
    if softcap is not None:
        scores = scores.tanh_()
    probabilities = scaled_softmax(
        scores.view(batch, heads, length, -1),
        after,
        causal=causal and length > 1,
        bias=bias,
        dropout=dropout,
        implementation=Implementation.CSRC,
    )
    if drop is not None:
        probabilities = drop(probabilities)
    return batched_product(probabilities.view(*flat_query.shape[:2], -1), flat_value).view(query.shape)  # [b, a, s, d]


def _flat(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Reshapes to one matrix per head of keys.

    Shapes: as in `attention` to query `[b*g, a/g*s, d]`, key and value `[b*g, k, d]`.
    """
    batch, groups = key.shape[:2]
    return query.reshape(batch * groups, -1, query.shape[-1]), key.flatten(0, 1), value.flatten(0, 1)


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None,
    shape: tuple[int, int, int, int],
    softcap: float | None,
) -> torch.Tensor:
    """Scaled scores, capped, plus the bias.

    Shapes: query `[b*g, a/g*s, d]`, key `[b*g, k, d]`, bias as in `attention`; result `shape`, `[b, a, s, k]`.
    """
    batch, heads, length, _ = shape
    repeats = query.shape[1] // length
    if (
        softcap is None
        and bias is not None
        and not needs_widening(query, query.shape[1])
        and bias.dtype == query.dtype
        and (repeats == 1 or bias.shape[:2] == (1, 1))
    ):
        flat_bias = bias[0].repeat(1, repeats, 1) if repeats > 1 else bias[0]  # a single product adds it, too
        if batch > 1 < bias.shape[0] * bias.shape[1]:
            flat_bias = bias.expand(batch, heads, -1, -1).reshape(-1, *bias.shape[2:])  # [b*a, s, k]
        return torch.baddbmm(flat_bias, query, key.transpose(1, 2), alpha=scale).view(shape)
    if softcap is None:
        scores = batched_product(query * scale, key.transpose(1, 2)).view(shape)
        return scores if bias is None else scores + bias
    shares = batched_product(query * (scale / softcap), key.transpose(1, 2)).tanh_().view(shape)
    return shares * softcap if bias is None else torch.add(bias, shares, alpha=softcap)


def _with_causal_mask(bias: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The bias with -inf where a key follows its query.

    Shapes: `[b or 1, 1 or a, s or 1, k]` to `[b or 1, 1 or a, s, k]`.
    """
    length, keys = query.shape[2], key.shape[2]
    dtype = query.dtype if bias is None else bias.dtype
    mask = torch.full((length, keys), float("-inf"), dtype=dtype, device=query.device).triu_(keys - length + 1)
    return mask[None, None] if bias is None else bias + mask


def _explicit_is_faster(query: torch.Tensor, key: torch.Tensor, dropout: float) -> bool:
    """True if materialized probabilities are faster, in training with fewer heads of keys than of queries.

    Backward of torch's fused attention on CPU computes in float32; up to 512 tokens, products in half precision take
    0.4 to 0.7 times as long, forward and backward. With equal numbers of heads the fused form is kept, so that results
    stay those of earlier releases.
    """
    is_half_on_cpu = query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16)
    is_training = torch.is_grad_enabled() and query.requires_grad and dropout == 0
    return is_half_on_cpu and is_training and key.shape[2] <= LONGEST_EXPLICIT


def _sound_kernels(key: torch.Tensor) -> AbstractContextManager[None]:
    """Disables cuDNN for lengths at which its gradients of attention with a bias are wrong.

    If the last tile of 128 keys is half full, backward scores the empty half as 0 instead of -inf, and the gradients of
    queries whose log-sum-exp is below -88.7 are NaN (torch 2.11 and newer on H100).

    Shapes: key `[b, g, k, d]`.

    Source: https://github.com/pytorch/pytorch/issues/196678.
    """
    is_half = key.dtype in (torch.bfloat16, torch.float16)
    if key.device.type == "cpu" or not is_half or key.shape[2] % _CUDNN_TILE != _CUDNN_TILE // 2:
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _dropout(probability: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda probabilities: F.dropout(probabilities, probability)
