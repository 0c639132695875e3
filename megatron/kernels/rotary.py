"""Rotary position embedding of queries and keys, and the split of a fused projection into queries, keys and values.

Compiled, queries and keys of any strides are rotated in one pass, which also splits the values off a fused projection.
The results are laid out token by token, as after a projection without rotation: fused attention writes its output
in the layout of the queries, so the next product needs no copy. Backward joins the three gradients in one pass.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from megatron.kernels.choice import Implementation


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotates pairs of channels: `(u, v)` becomes `(u cos - v sin, v cos + u sin)`.

    Only the first r channels of each head are rotated. The products are computed in the wider dtype of x and the
    cosines, and rounded once to x's. Cosines and sines have no gradient.

    Shapes: x `[b, a, s, d]`; cos and sin `[b or 1, 1, s, r/2]`, r even and at most d; the result as x.

    Args:
        interleaved: pairs are channels 2i and 2i + 1; otherwise channels i and i + r/2.

    Source: Su et al., "RoFormer", 2021, equation 34.
    """
    if torch.compiler.is_compiling():
        return _composed(x, cos, sin, interleaved)
    if torch.is_grad_enabled():
        return _Rotation.apply(x, cos, sin, interleaved)  # type: ignore[no-any-return]
    return _rotated(x, cos, sin, interleaved, 1)


def rotate_both(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    implementation: Implementation = Implementation.TORCH,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotate` of queries and of keys.

    Shapes: query `[b, a, s, d]`, key `[b, g, s, d]`, of any strides; cos and sin as in `rotate`; results as query and
    key.
    """
    if implementation is Implementation.CSRC:
        return torch.ops.megatron.rotary(query, key, cos, sin, interleaved, False)  # type: ignore[no-any-return]
    return rotate(query, cos, sin, interleaved=interleaved), rotate(key, cos, sin, interleaved=interleaved)


def split_rotated(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    implementation: Implementation = Implementation.TORCH,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits a fused projection into rotated queries, rotated keys, and values.

    Shapes: qkv `[b, s, g, a/g + 2, d]`, cos and sin as in `rotate`; results `[b, a, s, d]` and twice `[b, g, s, d]`.
    """
    if implementation is Implementation.CSRC:
        return torch.ops.megatron.rotary_split(qkv, cos, sin, interleaved)  # type: ignore[no-any-return]
    query, key, value = qkv.split([qkv.shape[3] - 2, 1, 1], dim=3)
    query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in (query, key, value))
    return *rotate_both(query, key, cos, sin, interleaved=interleaved), value


def split_heads(qkv: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the queries, keys and values of a fused projection whose bias was added without autograd.

    Backward joins the three gradients and sums the bias's gradient in one compiled pass; torch would read the joined
    gradients again for the sum. Requires the compiled operations, and on a GPU heads of a multiple of 8 channels.

    Shapes: qkv `[b, s, g, a/g + 2, d]`, bias `[g * (a/g + 2) * d]`; results `[b, a, s, d]` and twice `[b, g, s, d]`.
    """
    return torch.ops.megatron.split_heads(qkv, bias)  # type: ignore[no-any-return]


def doubled(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of all channels, for `rotate_few`. Shapes: `[..., r/2]` to `[..., r]`."""
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate_few(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`rotate` for halves of whole heads, without gradients, in the fewest operations.

    For few tokens, where launching an operation costs more than its computation.

    Shapes: x `[b, a, s, d]`; cos and sin `[b or 1, 1, s, d]`, made by `doubled`; the result as x.
    """
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


class _Rotation(torch.autograd.Function):
    """Backward is the rotation by the opposite angles, and does not need x."""

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotated(x, cos, sin, interleaved, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, sin, ctx.interleaved, -1), None, None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, direction: int) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    width = 2 * cos.shape[-1]
    result = torch.empty_like(wide)
    first, second = _pairs(wide[..., :width], interleaved)  # [b, a, s, r/2]
    new_first, new_second = _pairs(result[..., :width], interleaved)
    torch.mul(first, cos, out=new_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=new_second).addcmul_(first, sin, value=direction)
    if width < x.shape[-1]:
        result[..., width:] = wide[..., width:]
    return result.to(x.dtype)


def _composed(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """`rotate` without writing to views, which torch.compile cannot trace; it fuses this form."""
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    width = 2 * cos.shape[-1]
    first, second = _pairs(wide[..., :width], interleaved)  # [b, a, s, r/2]
    rotated = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return torch.cat((joined, wide[..., width:]), dim=-1).to(x.dtype) if width < x.shape[-1] else joined.to(x.dtype)


def _pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and second channel of every pair."""
    half = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])


def register() -> None:
    """Registers the result shapes of the compiled operations with torch; once, after the library is loaded."""
    torch.library.register_fake("megatron::rotary", lambda query, key, *_: (_like(query), _like(key)))
    torch.library.register_fake("megatron::rotary_split", _split_shapes)
    torch.library.register_fake("megatron::rotary_join", _joined_shape)
    torch.library.register_fake("megatron::join_heads", _joined_shapes)


def _like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def _split_shapes(qkv: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, length, groups, members, size = qkv.shape
    query, key, value = (qkv.new_empty(batch, length, groups * count, size) for count in (members - 2, 1, 1))
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _joined_shape(query: torch.Tensor, key: torch.Tensor, *_: object) -> torch.Tensor:
    batch, groups, length, size = key.shape
    return query.new_empty(batch, length, groups, query.shape[1] // groups + 2, size)


def _joined_shapes(query, key, value, sums_dtype):  # type: ignore[no-untyped-def]
    joined = _joined_shape(query, key)
    count = 0 if sums_dtype is None else joined[0, 0].numel()
    return joined, query.new_empty(count, dtype=sums_dtype or query.dtype)
