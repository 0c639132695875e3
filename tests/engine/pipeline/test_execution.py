"""The executor does what the simulation of a schedule says: the order of work, and the activations that ranks hold."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.config.sections.pipelines import SCHEDULE_CHUNKS
from megatron.engine.engine import Engine
from megatron.engine.pipeline import executor
from megatron.engine.pipeline.chunk_pass import ChunkPass, ChunkRunner
from megatron.parallel.joining import open_mesh
from megatron.parallel.messages import PendingMessage
from megatron.parallel.schedule.actions import Kind, Schedule
from megatron.parallel.schedule.building import build_schedule
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=8, hidden_size=32, vocab_size=16, global_batch_size=16)
RANKS, MICRO_BATCHES = 4, 8
BACKWARDS = {
    "backward": Kind.BACKWARD,
    "backward_of_input": Kind.INPUT_BACKWARD,
    "backward_of_weights": Kind.WEIGHT_BACKWARD,
}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of what operations have allocated and is still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known and storage._cdata not in given:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.now -= size


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@dataclasses.dataclass
class Record:
    """Actions of a rank in a step: (kind, chunk, micro-batch), and for messages (True if it sends, the other rank)."""

    actions: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    # live bytes after each computation, without its output and messages that are under way, and their change
    held: list[int] = dataclasses.field(default_factory=list)
    changes: list[int] = dataclasses.field(default_factory=list)

    @property
    def computations(self) -> list[tuple[Any, ...]]:
        return [action for action in self.actions if isinstance(action[0], Kind)]


@contextmanager
def recording(live: LiveBytes, first_sample: int) -> Iterator[Record]:
    """Notes what the executor has done, where it is done."""
    record = Record()
    places: MutableMapping[ChunkPass, tuple[int, int]] = weakref.WeakKeyDictionary()
    under_way: list[tuple[weakref.ref[PendingMessage], int]] = []
    forward, halves = ChunkRunner.forward, {name: getattr(ChunkPass, name) for name in BACKWARDS}

    def live_bytes() -> int:
        messages = ((message(), size) for message, size in under_way)
        return live.now - sum(size for message, size in messages if message and not message.is_over)

    def note(kind: Kind, passed: ChunkPass, before: int, output: torch.Tensor | None) -> None:
        record.actions.append((kind, *places[passed]))
        record.held.append(live_bytes() - (0 if output is None else output.nbytes))
        record.changes.append(record.held[-1] - before)

    def noted_forward(
        self: ChunkRunner, chunk: int, batch: Any, *given: Any, **options: Any
    ) -> tuple[torch.Tensor, ChunkPass]:
        before = live_bytes()
        output, passed = forward(self, chunk, batch, *given, **options)
        assert passed is not None
        places[passed] = chunk, (batch.first_sample - first_sample) // RECIPE.micro_batch_size
        note(Kind.FORWARD, passed, before, output)
        return output, passed

    def noted_backward(name: str) -> Callable[..., Any]:
        def run(self: ChunkPass, *given: Any) -> Any:
            before = live_bytes()
            with pytest.MonkeyPatch.context() as inside:
                inside.setattr(ChunkPass, "backward", halves["backward"])  # half a pass is made of it
                result = halves[name](self, *given)
            note(BACKWARDS[name], self, before, result)
            return result

        return run

    def noted_message(name: str) -> Callable[..., Any]:
        start = getattr(executor, name)

        def run(tensor: torch.Tensor, axis: Any, peer: int) -> Any:
            record.actions.append((name == "start_send", peer))
            message = start(tensor, axis, peer)
            under_way.append((weakref.ref(message), tensor.nbytes))
            return message

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkRunner, "forward", noted_forward)
        for name in BACKWARDS:
            patch.setattr(ChunkPass, name, noted_backward(name))
        for name in ("start_send", "start_receive"):
            patch.setattr(executor, name, noted_message(name))
        yield record


def recorded_step(engine: Engine, config: Any, step: int, micro_batches: int) -> Record:
    batches = local_batches(RECIPE, config, engine.mesh, step, True)[:micro_batches]
    live = LiveBytes()
    with recording(live, int(batches[0].sample_ids[0])) as record, live:
        engine.train_batch(batches, RECIPE.learning_rate)
    return record


def records(rank: int) -> dict[str, tuple[Record, Record]]:
    """A step of one micro-batch, and one of all of them, with each schedule."""
    mesh: Any = None
    found = {}
    for name in SCHEDULE_CHUNKS:
        config = layout_config(RECIPE, (1, RANKS, 1), 1, ["--pipeline-schedule", name, "--hidden-dropout", "0.1"])
        mesh = mesh or open_mesh(config.parallel)
        engine = build_engine(config, mesh)
        found[name] = recorded_step(engine, config, 0, 1), recorded_step(engine, config, 1, MICRO_BATCHES)
    return found


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, tuple[Record, Record]]]:
    return run_ranks(records, RANKS)


def schedule_of(name: str) -> Schedule:
    return build_schedule(name, RANKS, SCHEDULE_CHUNKS[name][0], MICRO_BATCHES)


@pytest.mark.full
def test_the_order_of_execution_is_the_simulated_one(by_rank: list[dict[str, tuple[Record, Record]]]) -> None:
    for rank, found in enumerate(by_rank):
        for name, (_, whole) in found.items():
            assert whole.actions == [
                (action.kind, action.chunk, action.micro_batch)
                if action.peer is None
                else (action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD), action.peer)
                for action in schedule_of(name).actions[rank]
            ], (name, rank)


def states(alone: Record) -> dict[tuple[Kind, int], int]:
    """What a micro-batch leaves in a chunk after the forward pass, and after the first half of the backward pass."""
    sizes: dict[tuple[Kind, int], int] = {}
    held_before = 0
    for (kind, chunk, _), held, change in zip(alone.computations, alone.held, alone.changes, strict=True):
        if kind is Kind.FORWARD:
            sizes[kind, chunk], held_before = held - held_before, held
        elif kind is Kind.INPUT_BACKWARD:
            sizes[kind, chunk] = sizes[Kind.FORWARD, chunk] + change
    return sizes


@pytest.mark.full
def test_ranks_hold_what_is_simulated(by_rank: list[dict[str, tuple[Record, Record]]]) -> None:
    """At the peak, in bytes: what one micro-batch alone leaves in each chunk, times those that the simulation has."""
    for rank, found in enumerate(by_rank):
        for name, (one, whole) in found.items():
            sizes, alive = states(one), {}
            simulated = most = 0
            for kind, chunk, micro_batch in whole.computations:
                alive[chunk, micro_batch] = sizes.get((kind, chunk), 0)
                most = max(most, sum(size > 0 for size in alive.values()))
                simulated = max(simulated, sum(alive.values()))
            assert most == schedule_of(name).peak_alive[rank]
            held = max(
                size for (kind, *_), size in zip(whole.computations, whole.held, strict=True) if kind is Kind.FORWARD
            )
            assert held == pytest.approx(simulated, rel=0.05), (name, rank)
