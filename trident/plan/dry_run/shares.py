"""Checks the division among ranks of a step's samples and a checkpoint's tensors."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron.config import RunConfig
from megatron.config.schedule import global_batch_size
from megatron.data.loader import first_samples
from megatron.parallel.shard_spec import shard_spec_of
from trident.plan.dry_run.rank_simulation import build_layers, mesh_at


class StepSamples(NamedTuple):
    """The samples of a step: its number, its first sample, and how many."""

    step: int
    first: int
    size: int

    def of_replica(self, config: RunConfig, replica: int) -> np.ndarray:
        """The samples that a replica reads, in order. Shapes: `[size / replicas]` int64."""
        micro, replicas = config.optim.micro_batch_size, config.parallel.data_parallel_size
        firsts = first_samples(self.first, self.size, micro, replica, replicas)
        return np.add.outer(firsts, np.arange(micro)).ravel()


def steps_of(config: RunConfig, samples: int) -> Iterator[StepSamples]:
    """The first steps of the run that read this many samples, or all."""
    first = 0
    for step in range(config.optim.train_iters):
        if first >= samples:
            return
        count = global_batch_size(config.optim, first)
        yield StepSamples(step, first, count)
        first += count


def sample_problems(given: StepSamples, read: Mapping[int, np.ndarray]) -> Iterator[str]:
    """Samples of a step that are read twice or not at all.

    Args:
        read: samples by the first rank of each replica.
    """
    every = np.concatenate(list(read.values()))
    if len(every) == given.size and np.array_equal(np.sort(every), given.first + np.arange(given.size)):
        return
    readers: dict[int, int] = {}
    for rank, numbers in read.items():
        for number in numbers.tolist():
            if number in readers:
                yield f"step {given.step}, rank {rank}: reads sample {number}, which rank {readers[number]} reads too"
            readers.setdefault(number, rank)
    for number in range(given.first, given.first + given.size):
        if number not in readers:
            yield f"step {given.step}: no rank reads sample {number}"


@dataclass(frozen=True)
class Box:
    """A shard of a tensor: its start and end in each dimension."""

    rank: int
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    def overlaps(self, other: Box) -> bool:
        """True if the shards share an element."""
        bounds = zip(self.start, self.stop, other.start, other.stop, strict=True)
        return all(first < their_end and their_first < end for first, end, their_first, their_end in bounds)


@dataclass(frozen=True)
class Pieces:
    """The shards of every tensor that the ranks of one replica save.

    Attributes:
        shapes: of the whole tensors, by name.
        boxes: saved shards, by name.
    """

    shapes: Mapping[str, tuple[int, ...]]
    boxes: Mapping[str, Sequence[Box]]


def pieces_of(config: RunConfig, ranks: Iterable[int], size: int) -> Pieces:
    """The shards that ranks save, one rank per class; built on the meta device."""
    shapes: dict[str, tuple[int, ...]] = {}
    boxes: dict[str, list[Box]] = defaultdict(list)
    for rank in ranks:
        mesh = mesh_at(config, rank, size)
        for parameter in build_layers(config, mesh)[1].parameters():
            spec = shard_spec_of(parameter)
            if spec.is_counted(mesh) and spec.replicas(mesh).rank == 0:
                name: str = parameter.global_name  # type: ignore[attr-defined]
                shapes[name] = spec.shape
                boxes[name].append(Box(rank, spec.start, spec.stop))
    return Pieces(shapes, dict(boxes))


def piece_problems(pieces: Pieces) -> Iterator[str]:
    """Tensors that are saved incompletely or twice."""
    for name, shape in pieces.shapes.items():
        boxes = sorted(pieces.boxes[name], key=lambda box: box.start)
        for before, after in pairwise(boxes):
            if before.overlaps(after):
                yield f"{name}: rank {before.rank} and rank {after.rank} both save elements from {list(after.start)} on"
        missing = math.prod(shape) - sum(box.size for box in boxes)
        if missing > 0:
            yield f"{name}: {missing:,} of {math.prod(shape):,} elements are saved by no rank: {_absent(boxes, shape)}"


def _absent(boxes: Sequence[Box], shape: tuple[int, ...]) -> str:
    """Describes the missing shard: its start, and the rank that should have it."""
    if not boxes:
        return "no rank has a shard of it"
    sizes = [stop - start for start, stop in zip(boxes[0].start, boxes[0].stop, strict=True)]
    corners = {box.start for box in boxes}
    starts = [range(0, size, part) for size, part in zip(shape, sizes, strict=True)]
    free = next(corner for corner in itertools.product(*starts) if corner not in corners)
    order = sorted(boxes, key=lambda box: box.start)
    before = next((box.rank for box in reversed(order) if box.start < free), None)
    after = next((box.rank for box in order if box.start > free), None)
    if before is not None and after is not None:
        owner = f"rank {before + 1}" if after - before == 2 else f"a rank between {before} and {after}"
    else:
        owner = f"rank {after - 1}" if after is not None else f"rank {before + 1}"  # type: ignore[operator]
    return f"the shard from {list(free)}, of {owner}"
