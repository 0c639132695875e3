"""2-norms and sums of lists of tensors; compiled, in one launch per list."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.kernels.choice import Implementation

Tensors = Sequence[torch.Tensor]

_HOST_ELEMENTS = 1 << 16


def norm(
    tensors: Tensors, *, per_tensor: bool = False, implementation: Implementation = Implementation.TORCH
) -> tuple[torch.Tensor, torch.Tensor]:
    """The 2-norm of all elements of a list, and of each tensor; float32, on the tensors' device.

    The compiled form sums squares in float64 and in a fixed order, so that it stays accurate for any number of elements
    and deterministic.

    Shapes: results `[]`, and `[n]` or, unless `per_tensor`, `[0]`.

    Args:
        tensors: at least one, all on one device; float32, float16 or bfloat16.

    Raises:
        ValueError: an empty list.
    """
    _check_any(tensors)
    if implementation is Implementation.CSRC:
        return torch.ops.megatron.multi_tensor_norm(list(tensors), per_tensor)  # type: ignore[no-any-return]
    each = torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors])
    return torch.linalg.vector_norm(each), each if per_tensor else each[:0]


def square_sum(tensors: Tensors, *, implementation: Implementation = Implementation.TORCH) -> torch.Tensor:
    """The sum of the squares of all elements of a list; float64, on the tensors' device.

    Squares are added in float64. The compiled form squares the norm, rounded to float32.

    Shapes: result `[]`.

    Args:
        tensors: at least one, dense, all on one device; float32, float16 or bfloat16.

    Raises:
        ValueError: an empty list.
    """
    _check_any(tensors)
    if implementation is Implementation.CSRC:
        return norm(tensors, implementation=implementation)[0].double().square()
    parts = [part for tensor in tensors for part in _host_parts(tensor)]
    return torch.stack(torch._foreach_norm(parts, 2, torch.float64)).square().sum()


def add_(totals: Tensors, addends: Tensors, *, implementation: Implementation = Implementation.TORCH) -> None:
    """`total += addend` for each pair, in float32.

    On a GPU, torch adds tensors of another dtype one by one, with a launch for each.

    Args:
        totals: float32, all on one device.
        addends: float32, float16 or bfloat16, each in the memory layout of its total.
    """
    if implementation is Implementation.CSRC and totals:
        torch.ops.megatron.multi_tensor_add_(list(totals), list(addends))
    elif totals:
        torch._foreach_add_(list(totals), list(addends))


def _host_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Splits a tensor so that torch reduces it on a CPU without a large copy in float64."""
    is_split = tensor.device.type == "cpu" and tensor.numel() > _HOST_ELEMENTS and tensor.is_contiguous()
    return tensor.view(-1).split(_HOST_ELEMENTS) if is_split else (tensor,)


def _check_any(tensors: Tensors) -> None:
    if not tensors:
        raise ValueError("expected at least one tensor, whose device the result takes, got an empty list")


def register() -> None:
    """Registers the result shapes of the compiled operations with torch; once, after the library is loaded."""
    torch.library.register_fake("megatron::multi_tensor_norm", _fake_norm)
    torch.library.register_fake("megatron::multi_tensor_add_", lambda *arguments: None)


def _fake_norm(tensors: Tensors, per_tensor: bool) -> tuple[torch.Tensor, torch.Tensor]:
    like = tensors[0]
    return (
        like.new_empty((), dtype=torch.float32),
        like.new_empty(len(tensors) if per_tensor else 0, dtype=torch.float32),
    )
