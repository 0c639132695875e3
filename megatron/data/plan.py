"""The data plan: what fixes the order of samples of a run, small enough for a checkpoint.

Megatron's order depends on the number of samples asked for, so that asking for more on a resume repeats and skips data.
Here the order is a list of segments. The first is Megatron's order for the samples planned at the start; a prolonged
run appends another segment of whole further epochs with a seed of its own, and all samples of a segment are used before
the next begins. Whatever was once planned is never reordered.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.data.index_map import plan_epochs
from megatron.errors import DataError

FORMAT_VERSION = 1

_BLEND_SURPLUS_RATIO = 1.005


@dataclass(frozen=True)
class Segment:
    """A stretch of whole epochs over one source, ordered by Megatron's algorithm.

    Args:
        samples: samples asked for when the segment was planned.
        seed: seed of its shuffles.
        rows: samples that its whole epochs hold; all of them belong to the order.
    """

    samples: int
    seed: int
    rows: int


@dataclass(frozen=True)
class SourcePlan:
    """One range of sequences of one token file and the segments planned over it.

    Args:
        prefix: data prefix; may change between runs, the fingerprint may not.
        fingerprint: see `IndexedDataset.fingerprint`.
        first, last: sequences [first, last) of the file.
        tokens: tokens in them.
        weight: share of the group's samples; the weights of a group sum to 1.
    """

    prefix: str
    fingerprint: str
    first: int
    last: int
    tokens: int
    weight: float
    segments: tuple[Segment, ...] = ()

    @property
    def rows(self) -> int:
        """Samples in all segments."""
        return sum(segment.rows for segment in self.segments)

    def identity(self) -> tuple[str, int, int, float]:
        """What must stay as it is for the order to mean the same samples."""
        return self.fingerprint, self.first, self.last, self.weight


@dataclass(frozen=True)
class GroupPlan:
    """The sources of one data set (training, one validation group, one test group) and the samples planned from it."""

    name: str
    blended: bool
    sources: tuple[SourcePlan, ...]
    samples: int = 0

    def extended(self, samples: int, sequence_length: int, seed: int, epoch_rule: str) -> GroupPlan:
        """The same order, continued until it holds at least `samples`; never shortened."""
        if samples <= self.samples:
            return self
        sources = []
        for source in self.sources:
            needed = math.ceil(samples * source.weight * _BLEND_SURPLUS_RATIO) if self.blended else samples
            sources.append(_extended_source(source, needed, sequence_length, seed, epoch_rule))
        return dataclasses.replace(self, samples=samples, sources=tuple(sources))

    def same_data(self, other: GroupPlan) -> bool:
        """Whether both name the same sequences with the same weights."""
        return self.blended == other.blended and [source.identity() for source in self.sources] == [
            source.identity() for source in other.sources
        ]


@dataclass(frozen=True)
class DataPlan:
    """Everything that fixes the order of samples, as JSON in the checkpoint; extended, never reordered.

    Args:
        train: None when the run has no training data.
        valid, test: one plan per named group.
    """

    sequence_length: int
    seed: int
    epoch_rule: str
    train: GroupPlan | None
    valid: tuple[GroupPlan, ...]
    test: tuple[GroupPlan, ...]

    def extended(self, samples: tuple[int, int, int]) -> DataPlan:
        """The plan continued to at least so many training, validation and test samples (per group)."""
        settings = (self.sequence_length, self.seed, self.epoch_rule)
        train, valid, test = samples
        return dataclasses.replace(
            self,
            train=self.train and self.train.extended(train, *settings),
            valid=tuple(group.extended(valid, *settings) for group in self.valid),
            test=tuple(group.extended(test, *settings) for group in self.test),
        )

    def to_json(self) -> dict[str, Any]:
        """A value of plain lists, dicts, numbers and strings."""
        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> DataPlan:
        """Reads what `to_json` gave.

        Raises:
            DataError: another version, or fields are missing.
        """
        if value.get("format_version") != FORMAT_VERSION:
            raise DataError(
                f"The stored data plan has format {value.get('format_version')!r}; this version reads {FORMAT_VERSION}."
            )
        try:
            return DataPlan(
                sequence_length=int(value["sequence_length"]),
                seed=int(value["seed"]),
                epoch_rule=str(value["epoch_rule"]),
                train=_group_from_json(value["train"]) if value["train"] else None,
                valid=tuple(_group_from_json(group) for group in value["valid"]),
                test=tuple(_group_from_json(group) for group in value["test"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as failure:
            raise DataError(f"The stored data plan is incomplete ({type(failure).__name__}: {failure}).") from failure


def segment_seed(seed: int, segment: int) -> int:
    """The seed of the k-th segment: the run's own for the first (so that it is Megatron's order), a hash of it for
    later ones.
    """
    if segment == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"data segment {segment} of seed {seed}".encode()).digest()[:4], "little")


def _extended_source(source: SourcePlan, needed: int, sequence_length: int, seed: int, epoch_rule: str) -> SourcePlan:
    missing = needed - source.rows
    if missing <= 0:
        return source
    rows = plan_epochs(source.tokens, sequence_length, missing, epoch_rule).samples
    segment = Segment(missing, segment_seed(seed, len(source.segments)), rows)
    return dataclasses.replace(source, segments=(*source.segments, segment))


def _group_from_json(value: Mapping[str, Any]) -> GroupPlan:
    return GroupPlan(
        name=str(value["name"]),
        blended=bool(value["blended"]),
        sources=tuple(_source_from_json(source) for source in value["sources"]),
        samples=int(value["samples"]),
    )


def _source_from_json(value: Mapping[str, Any]) -> SourcePlan:
    return SourcePlan(
        prefix=str(value["prefix"]),
        fingerprint=str(value["fingerprint"]),
        first=int(value["first"]),
        last=int(value["last"]),
        tokens=int(value["tokens"]),
        weight=float(value["weight"]),
        segments=tuple(
            Segment(int(segment["samples"]), int(segment["seed"]), int(segment["rows"]))
            for segment in value["segments"]
        ),
    )
