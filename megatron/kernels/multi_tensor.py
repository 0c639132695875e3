"""2-norm, scaling and a finite check of lists of tensors; compiled, one launch serves a whole list."""

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

    The compiled one sums squares in float64, in a fixed order, so that no number of elements makes it inexact and equal
    inputs give equal bits.

    Shapes: results `[]`, and `[n]` or, unless `per_tensor`, `[0]`.

    Args:
        tensors: at least one, all on one device; float32, float16 or bfloat16.

    Raises:
        ValueError: there are none.
    """
    _check_any(tensors)
    if implementation is Implementation.CSRC:
        return torch.ops.megatron.multi_tensor_norm(list(tensors), per_tensor)  # type: ignore[no-any-return]
    each = torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors])
    return torch.linalg.vector_norm(each), each if per_tensor else each[:0]


def square_sum(tensors: Tensors, *, implementation: Implementation = Implementation.TORCH) -> torch.Tensor:
    """The sum of the squares of all elements of a list; float64, on the tensors' device.

    Squares are added in float64. The compiled sum is that of a norm rounded to float32.

    Shapes: result `[]`.

    Args:
        tensors: at least one, dense, all on one device; float32, float16 or bfloat16.

    Raises:
        ValueError: there are none.
    """
    _check_any(tensors)
    if implementation is Implementation.CSRC:
        return norm(tensors, implementation=implementation)[0].double().square()
    parts = [part for tensor in tensors for part in _host_parts(tensor)]
    return torch.stack(torch._foreach_norm(parts, 2, torch.float64)).square().sum()


def scale_(
    destinations: Tensors,
    sources: Tensors,
    factor: float | torch.Tensor,
    *,
    implementation: Implementation = Implementation.TORCH,
) -> None:
    """`destination = source * factor` for each pair, computed in float32; the pair may differ in dtype or be the same
    tensor.

    Args:
        factor: a float32 tensor of one element on the tensors' device is not copied to the host.
    """
    if implementation is Implementation.CSRC and destinations:
        on_device = factor if isinstance(factor, torch.Tensor) else None
        number = 1.0 if isinstance(factor, torch.Tensor) else factor
        torch.ops.megatron.multi_tensor_scale_(list(destinations), list(sources), number, on_device)
        return
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source.to(torch.float32) * factor)


def not_finite(tensors: Tensors, *, implementation: Implementation = Implementation.TORCH) -> torch.Tensor:
    """1.0 if any element of a list is infinite or not a number, else 0.0, without waiting for the device.

    Shapes: result `[]` float32.

    Raises:
        ValueError: there are no tensors.
    """
    _check_any(tensors)
    if implementation is Implementation.CSRC:
        return torch.ops.megatron.multi_tensor_not_finite(list(tensors))  # type: ignore[no-any-return]
    wrong = torch.stack([~torch.isfinite(tensor).all() for tensor in tensors])
    return wrong.any().to(torch.float32)


def _host_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """A tensor in parts that torch reduces on a CPU without a large copy in float64."""
    is_split = tensor.device.type == "cpu" and tensor.numel() > _HOST_ELEMENTS and tensor.is_contiguous()
    return tensor.view(-1).split(_HOST_ELEMENTS) if is_split else (tensor,)


def _check_any(tensors: Tensors) -> None:
    if not tensors:
        raise ValueError("the list has 0 tensors, so no device is known for the result; it must have at least one")


def register() -> None:
    """Tells torch the shapes of the compiled operations' results; once, after the library is loaded."""
    torch.library.register_fake("megatron::multi_tensor_norm", _fake_norm)
    torch.library.register_fake("megatron::multi_tensor_scale_", lambda *arguments: None)
    torch.library.register_fake(
        "megatron::multi_tensor_not_finite", lambda tensors: tensors[0].new_empty((), dtype=torch.float32)
    )


def _fake_norm(tensors: Tensors, per_tensor: bool) -> tuple[torch.Tensor, torch.Tensor]:
    like = tensors[0]
    return (
        like.new_empty((), dtype=torch.float32),
        like.new_empty(len(tensors) if per_tensor else 0, dtype=torch.float32),
    )
