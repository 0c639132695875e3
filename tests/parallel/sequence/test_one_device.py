"""A ring whose ranks are threads on one device: it computes flash attention, and messages travel while it computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels.attention.partial import PartialAttention
from megatron.parallel.mesh import Axis
from megatron.parallel.sequence.ring import RingPlan, _Ring
from megatron.parallel.sequence.split import SequenceSplit
from megatron.parallel.sequence.tiles import Visibility

RANKS, LENGTH, HEADS, GROUPS, SIZE = 4, 512, 4, 2, 16
SENT, COMPUTED, WAITED = "sent", "computed", "waited"


class Wires:
    """What the threads send each other: message n of a rank reaches the n-th receive of the next."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.queues: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {}

    def of(self, rank: int, number: int) -> queue.Queue[torch.Tensor]:
        with self.lock:
            return self.queues.setdefault((rank % RANKS, number), queue.Queue())


@dataclass(frozen=True)
class LocalPlan(RingPlan):
    """The plan of a thread; it writes down what it does."""

    wires: Wires = field(default_factory=Wires)
    events: list[str] = field(default_factory=list)

    def send_on(self, sent: torch.Tensor) -> Any:
        number = self.events.count(SENT)
        self.events.append(SENT)
        self.wires.of(self.ring.rank + 1, number).put(sent)

        def wait() -> torch.Tensor:
            received = self.wires.of(self.ring.rank, number).get(timeout=60).clone()
            self.events.append(WAITED)
            return received

        return SimpleNamespace(wait=wait)


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


def attend(
    states: list[torch.Tensor], gradient: torch.Tensor
) -> tuple[list[torch.Tensor], list[tuple[list[str], list[str]]]]:
    """The result and the gradients of a ring of threads, and what each did forward and backward."""
    wires = Wires(), Wires()
    whole = [torch.zeros_like(part) for part in (gradient, *states)]

    def run(rank: int) -> tuple[list[str], list[str]]:
        events: list[str] = []
        split = SequenceSplit(Axis("cp", rank, RANKS, tuple(range(RANKS))), Axis.single("sp"))
        plan = RingPlan.of(split, LENGTH, None, Recorded(SIZE**-0.5, events), Visibility(), (), gradient.device)
        places = torch.from_numpy(split.places(LENGTH)[0]).to(gradient.device)
        context = SimpleNamespace()
        context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
        local = LocalPlan(**{**vars(plan), "wires": wires[0], "events": events})
        with torch.no_grad():
            out = _Ring.forward(context, *(part[:, :, places] for part in states), None, local)
            forward = list(events)
            events.clear()
            context.plan = LocalPlan(**{**vars(plan), "wires": wires[1], "events": events})
            gradients = _Ring.backward(context, gradient[:, :, places])[:3]
        for part, values in zip(whole, (out, *gradients), strict=True):
            part[:, :, places] = values
        return forward, list(events)

    with ThreadPoolExecutor(RANKS) as pool:
        return whole, list(pool.map(run, range(RANKS)))


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
