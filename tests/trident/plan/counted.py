"""What one rank of a run holds, counted while it trains a step; the other ranks do not exist."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.config import Machine, RunConfig, RunRequest, TokenizerFacts, parse, resolve
from megatron.data.loader import Batch
from megatron.engine.engine import Engine
from megatron.engine.memory.held import held_bytes
from megatron.engine.totals import StepTotals
from megatron.parallel.mesh import build_mesh, requested_axes
from megatron.train.start_up.engine_opening import build_engine

NETWORK = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "128"),
    *("--max-position-embeddings", "128", "--hidden-dropout", "0", "--attention-dropout", "0", "--vocab-size", "500"),
    *("--lr", "1e-3", "--train-iters", "9", "--data-path", "x", "--vocab-file", "v", "--merge-file", "m"),
)


class AliveActivations(torch.autograd.graph.saved_tensors_hooks):
    """The bytes that autograd keeps, each memory counted once and the given one not."""

    def __init__(self, without: Sequence[torch.Tensor]) -> None:
        self._without = {tensor.untyped_storage()._cdata for tensor in without}
        self._alive: Counter[int] = Counter()
        self.bytes = self.peak = 0
        super().__init__(self._keep, lambda held: held.tensor)

    def _keep(self, tensor: torch.Tensor) -> _Held:
        return _Held(tensor, self)

    def change(self, tensor: torch.Tensor, by: int) -> None:
        """A tensor is kept once more, or once less."""
        storage = tensor.untyped_storage()
        key, before = storage._cdata, self._alive[storage._cdata]
        self._alive[key] += by
        if key not in self._without and 0 in (before, self._alive[key]):
            self.bytes += by * storage.nbytes()
            self.peak = max(self.peak, self.bytes)


class _Held:
    def __init__(self, tensor: torch.Tensor, counter: AliveActivations) -> None:
        self.tensor, self._counter = tensor, counter
        counter.change(tensor, 1)

    def __del__(self) -> None:
        self._counter.change(self.tensor, -1)


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process a rank of a run whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with mock.patch.dict(os.environ, {"LOCAL_RANK": "0", "RANK": str(rank), "WORLD_SIZE": str(world_size)}):
            yield
    finally:
        dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class Counted:
    """What was asked for, and what was held: between steps by kind, and of activations at the peak of one."""

    request: RunRequest
    config: RunConfig
    weights: int
    gradients: int
    optimizer: int
    activations: int


def counted(words: Sequence[str], rank: int, world_size: int) -> Counted:
    """Trains two steps of one rank."""
    request = parse([*NETWORK, *words])
    config = resolve(request, Machine("cpu", world_size, True, True), TokenizerFacts(500, 1, ""))
    with fake_rank(rank, world_size):
        mesh = build_mesh(requested_axes(config.parallel, world_size), "cpu", 0, timedelta(minutes=1))
        engine = build_engine(config, mesh.configured(config.parallel))
        return _counted_step(request, config, engine)


def _counted_step(request: RunRequest, config: RunConfig, engine: Engine) -> Counted:
    optim = config.optim
    drawn = np.random.default_rng(1).integers(0, 500, (optim.micro_batch_size, config.data.seq_length + 1))
    tokens, labels = (np.ascontiguousarray(part) for part in (drawn[:, :-1], drawn[:, 1:]))
    batch = Batch(tokens, labels, np.ones(tokens.shape, np.float32), np.arange(len(tokens)), None)
    count = optim.global_batch_size // (optim.micro_batch_size * config.parallel.data_parallel_size)
    held = []

    def note(phase: str) -> None:
        if phase == "step":
            held.append(held_bytes(engine))

    engine.on_phase = note
    alive = AliveActivations(list(engine.parameters()))
    # What others would send is zero: with anything else in it the update of the first step, which makes the moments,
    # could be left out, as without a token that the last stage has counted.
    zeros = mock.patch.multiple(torch, empty=torch.zeros, empty_like=torch.zeros_like)
    over_ranks = StepTotals.over_ranks
    trained = mock.patch.object(StepTotals, "over_ranks", lambda *given: over_ranks(*given).clamp(min=1.0))
    for _ in range(2):
        with alive, zeros, trained:
            engine.train_batch([batch] * count, 1e-3)
    return Counted(request, config, held[-1].parameters, held[-1].gradients, held[-1].optimizer, alive.peak)
