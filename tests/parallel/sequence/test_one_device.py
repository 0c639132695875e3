"""A ring whose ranks are threads on one device: it computes flash attention, and messages travel while it computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.gpu.ring import SENT, WAITED, LocalRing, Passes
from megatron.kernels.attention.partial import PartialAttention

RANKS, LENGTH, HEADS, GROUPS, SIZE = 4, 512, 4, 2, 16
COMPUTED = "computed"


class Recorded(PartialAttention):
    """Writes down each tile that it computes."""

    def __init__(self, scale: float, events: list[str]) -> None:
        super().__init__(scale)
        object.__setattr__(self, "events", events)

    def forward(self, *parts: torch.Tensor, **bounds: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.events.append(COMPUTED)  # type: ignore[attr-defined]
        return super().forward(*parts, **bounds)

    def backward(self, *parts: torch.Tensor, **bounds: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.events.append(COMPUTED)  # type: ignore[attr-defined]
        return super().backward(*parts, **bounds)


def attend(states: list[torch.Tensor], gradient: torch.Tensor) -> tuple[list[torch.Tensor], list[Passes]]:
    """The result and the gradients of a ring of threads, and what each did forward and backward."""
    ring = LocalRing(RANKS, LENGTH, gradient.device, lambda events: Recorded(SIZE**-0.5, events))
    results, passes = ring.run(ring.divided([*states, gradient]))
    return ring.joined(results), passes


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_ring_on_one_device_is_flash_attention(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, heads, LENGTH, SIZE) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    *states, gradient = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    exact, flash = ([part.to(kind).requires_grad_() for part in states] for kind in (torch.float64, dtype))
    results = []
    for parts in (exact, flash):
        out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)  # type: ignore[arg-type]
        out.backward(gradient.to(out.dtype))
        results.append([out.detach(), *(part.grad for part in parts if part.grad is not None)])
    found, _ = attend(states, gradient)
    for wanted, of_flash, of_ring in zip(*results, found, strict=True):
        errors = [float((part.double() - wanted).abs().max() / wanted.abs().max()) for part in (of_flash, of_ring)]
        limit = 1e-6 if dtype is torch.float32 else 2**-7  # of bf16 the last bit of the largest value
        assert errors[1] < max(limit, 2 * errors[0]), errors


def test_messages_travel_while_attention_is_computed() -> None:
    states = [torch.randn(1, heads, LENGTH, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    for forward, backward in attend(states, torch.randn(1, HEADS, LENGTH, SIZE))[1]:
        assert forward == [SENT, COMPUTED, WAITED] * (RANKS - 1) + [COMPUTED]
        # The gradients of the block before travel during the tile, and so does the next block.
        first, last = [SENT, COMPUTED, SENT, WAITED], [COMPUTED, WAITED, SENT, WAITED]
        assert backward == first + [SENT, COMPUTED, WAITED, SENT, WAITED] * (RANKS - 2) + last
