"""The cost of ring attention: ranks as threads on one device, compared with flash attention of the whole sample.

Messages are copies on the device, so that the ranks' computation is all that takes time besides.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.context import Context
from benchmarks.gpu.records import Target
from benchmarks.gpu.timing import seconds_per_call
from megatron.kernels.attention.partial import PartialAttention
from megatron.parallel.mesh import Axis
from megatron.parallel.sequence.ring import RingPlan, _Ring
from megatron.parallel.sequence.split import SequenceSplit
from megatron.parallel.sequence.tiles import Visibility

SENT, WAITED = "sent", "waited"
RANKS = (2, 4, 8)
LENGTH, HEADS, SIZE = 32768, 16, 128
ROUNDING = Target(at_most=2**-7)  # the last bit of the largest value in bfloat16
Passes = tuple[list[str], list[str]]  # what a rank did forward and backward, in order


class Wires:
    """The messages between threads: message n of a rank reaches the n-th receive of the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {}

    def of(self, rank: int, number: int) -> queue.Queue[torch.Tensor]:
        """The way of one message to a rank."""
        with self._lock:
            return self._queues.setdefault((rank, number), queue.Queue())


@dataclass(frozen=True)
class LocalPlan(RingPlan):
    """The plan of a thread; it writes down what it does."""

    wires: Wires = field(default_factory=Wires)
    events: list[str] = field(default_factory=list)

    def rotate(self, sent: torch.Tensor) -> Any:
        """Puts a block where the next thread finds it."""
        number = self.events.count(SENT)
        self.events.append(SENT)
        self.wires.of((self.ring.rank + 1) % self.ring.size, number).put(sent)

        def wait() -> torch.Tensor:
            received = self.wires.of(self.ring.rank, number).get(timeout=60).clone()
            self.events.append(WAITED)
            return received

        return SimpleNamespace(wait=wait)


class LocalRing:
    """Ring attention of causal samples by threads.

    Args:
        attention_of: makes the attention of a rank, given where it may write down what it does.
    """

    def __init__(
        self, ranks: int, length: int, device: torch.device, attention_of: Callable[[list[str]], PartialAttention]
    ) -> None:
        self._ranks = ranks
        splits = [
            SequenceSplit(Axis("cp", rank, ranks, tuple(range(ranks))), Axis.single("sp")) for rank in range(ranks)
        ]
        self._events: list[list[str]] = [[] for _ in splits]
        self._places = [torch.from_numpy(split.positions(length)[0]).to(device) for split in splits]
        self._plans = [
            RingPlan.of(split, length, None, attention_of(events), Visibility(), (), device)
            for split, events in zip(splits, self._events, strict=True)
        ]

    def divided(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Splits tensors over the ranks. Shapes: each `[b, a, s, d]` to `[b, a, s/ranks, d]`."""
        return [[tensor[:, :, places].contiguous() for tensor in tensors] for places in self._places]

    def joined(self, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The reverse of `divided`."""
        order = torch.cat(self._places).argsort()
        return [torch.cat(of_ranks, dim=2)[:, :, order] for of_ranks in zip(*parts, strict=True)]

    def run(self, parts: Sequence[Sequence[torch.Tensor]]) -> tuple[list[tuple[torch.Tensor, ...]], list[Passes]]:
        """Forward and backward on all ranks.

        Args:
            parts: of each rank queries, keys, values and the gradient of the result.

        Returns:
            Of each rank the result and the gradients of queries, keys and values; and what it did.
        """
        wires = Wires(), Wires()

        def of_rank(rank: int) -> tuple[tuple[torch.Tensor, ...], Passes]:
            events, (*states, gradient) = self._events[rank], parts[rank]
            context = SimpleNamespace()
            context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
            plans = [LocalPlan(**{**vars(self._plans[rank]), "wires": pair, "events": events}) for pair in wires]
            events.clear()
            with torch.no_grad():
                out = _Ring.forward(context, *states, None, plans[0])
                forward = list(events)
                events.clear()
                context.plan = plans[1]
                gradients = _Ring.backward(context, gradient)[:3]
            return (out, *gradients), (forward, list(events))

        with ThreadPoolExecutor(self._ranks) as pool:
            results = list(pool.map(of_rank, range(self._ranks)))
        return [result for result, _ in results], [passes for _, passes in results]


def measure_ring(context: Context) -> None:
    """Rings of several sizes: how far from flash attention their numbers are, and their time in times of its."""
    length, heads, size = (64, 2, 16) if context.is_tiny else (LENGTH, HEADS, SIZE)
    torch.manual_seed(1)
    shape = (1, heads, length, size)
    states = [torch.randn(shape, dtype=torch.bfloat16, device=context.device) for _ in range(4)]
    query, key, value = (part.requires_grad_() for part in states[:3])

    def flash() -> tuple[torch.Tensor, ...]:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return (out.detach(), *torch.autograd.grad(out, (query, key, value), states[3]))

    of = {"of": f"{length} tokens, {heads} heads of {size}, bf16, forward and backward"}
    repeats = 2 if context.is_tiny else 10
    wanted, alone = flash(), seconds_per_call(flash, context.device, repeats=repeats)
    context.recorder.figure("flash attention", alone * 1e3, "ms", **of)
    for ranks in RANKS:
        ring = LocalRing(ranks, length, context.device, lambda _: PartialAttention(size**-0.5))
        parts = ring.divided([part.detach() for part in states])
        found = ring.joined(ring.run(parts)[0])
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))
        seconds = seconds_per_call(partial(ring.run, parts), context.device, repeats=repeats)
        context.recorder.figure("largest difference, relative", error, "", target=ROUNDING, ranks=ranks, **of)
        context.recorder.figure("ring in times of flash attention", seconds / alone, "", ranks=ranks, **of)
