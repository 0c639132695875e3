"""A million tokens on 64 ranks, simulated on one: messages and memory are what formulas say.

The backend moves nothing and attention computes nothing; everything else of a block runs as it is.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config import ModelConfig
from megatron.kernels.attention.partial import PartialAttention
from megatron.model.blocks.attention_forms import inner
from megatron.model.gpt import block_layers
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import ParallelMesh, build_mesh, standard_axes
from megatron.parallel.sequence.split import SequenceSplit
from tests.helpers.ranks import run_ranks

TOKENS, HEADS, GROUPS, SIZE = 16384, 64, 8, 1  # of a rank; so that activations are small
BYTES = 4


class Memory(TorchDispatchMode):
    """The most bytes that the tensors made under it take at once, those of a message or more."""

    def __init__(self, smallest: int) -> None:
        super().__init__()
        self.smallest, self.now, self.peak = smallest, 0, 0
        self.known: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for part in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(part, torch.Tensor):
                self._count(part)
        return results

    def _count(self, part: torch.Tensor) -> None:
        storage = part.untyped_storage()
        size, place = storage.nbytes(), storage.data_ptr()
        if size < self.smallest:
            return
        if place not in self.known:
            self.now += size
            self.peak = max(self.peak, self.now)
        self.known[place] = self.known.get(place, 0) + 1
        weakref.finalize(part, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self.known[place] -= 1
        if not self.known[place]:
            del self.known[place]
            self.now -= size


def measure_layouts(rank: int, layouts: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Of each layout, as one of its ranks sees it: bytes sent forward and backward, and memory."""
    measured = []
    for ring, ulysses in layouts:
        ranks = ring * ulysses
        dist.init_process_group("fake", store=FakeStore(), rank=ranks // 2, world_size=ranks)
        mesh = build_mesh(standard_axes(ranks, cp=ring, sp=ulysses), "cpu", 0, timedelta(minutes=1))
        measured.append(_measured(mesh))
        dist.destroy_process_group()
    return measured


def _measured(mesh: ParallelMesh) -> tuple[int, int, int]:
    ring, ulysses = mesh.cp.size, mesh.sp.size
    length = TOKENS * ring * ulysses
    config = ModelConfig(
        num_layers=1,
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        max_position_embeddings=length,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        vocab_size=128,
        padded_vocab_size=128,
    )
    sent: list[int] = []
    passed_on, exchanged = dist.batch_isend_irecv, dist.all_to_all_single

    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
        sent.extend(part.tensor.nbytes for part in operations if part.op is dist.isend)
        return passed_on(operations)

    def all_to_all_single(output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup) -> Any:
        sent.append(given.nbytes // ulysses * (ulysses - 1))
        return exchanged(output, given, group=group)

    def nothing(self: PartialAttention, query: torch.Tensor, *parts: torch.Tensor, **bounds: Any) -> Any:
        return query, query.new_zeros(query.shape[:3])

    def no_gradients(self: PartialAttention, gradient: torch.Tensor, *parts: torch.Tensor, **bounds: Any) -> Any:
        return tuple(map(torch.zeros_like, parts[:3]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", batch_isend_irecv)
        patch.setattr(dist, "all_to_all_single", all_to_all_single)
        patch.setattr(PartialAttention, "forward", nothing)
        patch.setattr(PartialAttention, "backward", no_gradients)
        patch.setattr(inner, "attention", lambda query, *parts, **bounds: query + 0 * sum(p.sum() for p in parts[:2]))
        stack = LayerStack(block_layers(config, mesh), seed=1)
        split = SequenceSplit.of(mesh, causal=True, by_document=False)
        hidden = torch.zeros(1, TOKENS, HEADS * SIZE, requires_grad=True)
        with Memory(TOKENS * GROUPS * BYTES) as memory:
            out = stack(hidden, StepContext(torch.zeros(1, dtype=torch.int64), split=split))
            forward = sum(sent)
            out.backward(torch.ones_like(out))
    return forward, sum(sent) - forward, memory.peak


def test_messages_and_memory_of_a_million_tokens() -> None:
    layouts = [(1, 1), (4, 1), (64, 1), (1, 64), (8, 8)]
    (measured,) = run_ranks(measure_layouts, 1, layouts)
    memory = {}
    for (ring, ulysses), (forward, backward, peak) in zip(layouts, measured, strict=True):
        groups = max(GROUPS, ulysses)  # as many as there are ranks that need one
        exchange = (2 * HEADS + 2 * groups if ulysses > 1 else 0) * TOKENS * SIZE * BYTES // ulysses * (ulysses - 1)
        block = 2 * groups * TOKENS * SIZE * BYTES  # of keys and values, on every rank
        assert forward == exchange + (ring - 1) * block
        assert backward == exchange + ((2 * ring - 1) * block if ring > 1 else 0)  # float32, as the keys are
        memory[ring, ulysses] = peak
    assert memory[64, 1] == memory[4, 1]  # a longer ring needs no more
    assert max(memory.values()) < 1.25 * memory[1, 1]  # and no form much more than one process with as many tokens
