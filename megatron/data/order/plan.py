"""The data plan: what fixes the order of samples of a run, small enough for a checkpoint.

Megatron's order depends on the number of samples asked for, so that asking for more on a resume repeats and skips data.
Here every source has an order of its own, a list of segments. The first is Megatron's order for the samples planned at
the start; an extended run appends another segment of whole further epochs with a seed of its own, and all samples of a
segment are used before the next begins. What has been planned is never reordered.

How the sources are mixed is a list of phases. A run has one, unless its blend is changed at a resume: then a phase with
the new weights begins at the consumed samples of that checkpoint, and the phases before it stay as they were. In the
new phase a source that was there before continues at the sample up to which it was consumed, so none of its samples is
skipped, and none repeated before its epochs say so; a new source begins at its first sample; one that is left out is
remembered, and continues where it stopped if it comes back. A phase is fixed by its first sample, its weights and the
consumed counts, all of which are stored, so every resume from one checkpoint gives the same order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from megatron.data.order.index_map import plan_epochs
from megatron.errors import DataError

FORMAT_VERSION = 2
_FORMAT_WITHOUT_PHASES = 1

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
        tokens: tokens in them; of rows, the samples' length for each.
        is_rows: whether each of them is a row that is a sample by itself, as in Parquet windows and document stores.
    """

    prefix: str
    fingerprint: str
    first: int
    last: int
    tokens: int
    segments: tuple[Segment, ...] = ()
    is_rows: bool = False

    @property
    def rows(self) -> int:
        """Samples in all segments."""
        return sum(segment.rows for segment in self.segments)

    def identity(self) -> tuple[str, int, int]:
        """What makes it the same source, wherever its files are."""
        return self.fingerprint, self.first, self.last


@dataclass(frozen=True)
class Member:
    """A source that takes part in a phase.

    Args:
        source: its place among the sources of the group.
        weight: its share of the phase's samples; the weights of a phase sum to 1.
    """

    source: int
    weight: float


@dataclass(frozen=True)
class Phase:
    """A stretch of the order in which the sources are mixed by the same weights.

    Args:
        first: its first sample, counted from the start of the run.
        consumed: samples that were taken of each source of the group before; sources that are not listed had none.
        blended: false only for one prefix that was given without a weight, which is planned without surplus.
    """

    first: int
    members: tuple[Member, ...]
    consumed: tuple[int, ...] = ()
    blended: bool = True

    @property
    def weights(self) -> list[float]:
        """The members' shares."""
        return [member.weight for member in self.members]

    def consumed_of(self, source: int) -> int:
        """Samples of a source that were taken before the phase."""
        return self.consumed[source] if source < len(self.consumed) else 0


@dataclass(frozen=True)
class GroupPlan:
    """The order of one data set (training, one validation group, one test group) and the samples planned from it.

    Args:
        sources: every source that any phase takes part of, in the order of their first appearance.
        phases: at least one; the last one is open, each other ends where the next begins.
        samples: end of the last phase.
    """

    name: str
    sources: tuple[SourcePlan, ...]
    phases: tuple[Phase, ...]
    samples: int = 0

    def length_of(self, phase: int) -> int:
        """Samples of the phase of that number."""
        ends = [*(phase.first for phase in self.phases[1:]), self.samples]
        return ends[phase] - self.phases[phase].first

    def source_names(self) -> tuple[str, ...]:
        """A short name for each source: the last part of its prefix, numbered from its second use on.

        Sources are only ever appended, so a name stays when the blend changes.
        """
        names: list[str] = []
        for source in self.sources:
            name = numbered = PurePath(source.prefix).name
            for number in itertools.count(2):
                if numbered not in names:
                    break
                numbered = f"{name}#{number}"
            names.append(numbered)
        return tuple(names)

    def extended(self, samples: int, sequence_length: int, seed: int, epoch_rule: str) -> GroupPlan:
        """The same order, continued until it holds at least `samples`; never shortened."""
        if samples <= self.samples:
            return self
        phase = self.phases[-1]
        length = samples - phase.first
        sources = list(self.sources)
        for member in phase.members:
            taken = math.ceil(length * member.weight * _BLEND_SURPLUS_RATIO) if phase.blended else length
            needed = phase.consumed_of(member.source) + taken
            source = sources[member.source]
            sources[member.source] = _extended_source(source, needed, sequence_length, seed, epoch_rule)
        return dataclasses.replace(self, samples=samples, sources=tuple(sources))


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
        """The plan extended to at least these numbers of training, validation and test samples (per group)."""
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
        version = value.get("format_version")
        if version not in (_FORMAT_WITHOUT_PHASES, FORMAT_VERSION):
            raise DataError(
                f"The stored data plan has format {version!r}; this version reads {_FORMAT_WITHOUT_PHASES} and "
                f"{FORMAT_VERSION}. Continue with the version of the program that wrote it, or with --finetune."
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
    if source.is_rows:
        epoch = source.last - source.first
        rows = -(-missing // epoch) * epoch
    else:
        rows = plan_epochs(source.tokens, sequence_length, missing, epoch_rule).samples
    segment = Segment(missing, segment_seed(seed, len(source.segments)), rows)
    return dataclasses.replace(source, segments=(*source.segments, segment))


def _group_from_json(value: Mapping[str, Any]) -> GroupPlan:
    sources = tuple(_source_from_json(source) for source in value["sources"])
    if "phases" in value:
        phases = tuple(_phase_from_json(phase) for phase in value["phases"])
    else:
        members = tuple(Member(place, float(source["weight"])) for place, source in enumerate(value["sources"]))
        phases = (Phase(0, members, blended=bool(value["blended"])),)
    if not phases or any(member.source not in range(len(sources)) for phase in phases for member in phase.members):
        raise ValueError(f"group {value['name']} has {len(phases)} phases that name sources of {len(sources)}")
    return GroupPlan(str(value["name"]), sources, phases, int(value["samples"]))


def _phase_from_json(value: Mapping[str, Any]) -> Phase:
    return Phase(
        first=int(value["first"]),
        members=tuple(Member(int(member["source"]), float(member["weight"])) for member in value["members"]),
        consumed=tuple(int(count) for count in value["consumed"]),
        blended=bool(value["blended"]),
    )


def _source_from_json(value: Mapping[str, Any]) -> SourcePlan:
    return SourcePlan(
        prefix=str(value["prefix"]),
        fingerprint=str(value["fingerprint"]),
        first=int(value["first"]),
        last=int(value["last"]),
        tokens=int(value["tokens"]),
        segments=tuple(
            Segment(int(segment["samples"]), int(segment["seed"]), int(segment["rows"]))
            for segment in value["segments"]
        ),
        is_rows=bool(value.get("is_rows", False)),
    )
