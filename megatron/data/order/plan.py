"""The data plan: what fixes the order of samples of a run, small enough for a checkpoint.

Megatron's order depends on the number of samples asked for, so that asking for more on a resume repeats and skips data.
Here every source has an order of its own, a list of segments. The first is Megatron's order for the samples planned at
the start; an extended run appends another segment of whole epochs with a seed of its own, and all samples of a segment
are used before the next begins. What has been planned is never reordered.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from megatron.data.order.index_map import SEPARATE_BELOW_RATIO, plan_epochs
from megatron.errors import DataError, printable

FORMAT_VERSION = 2
_FORMAT_WITHOUT_PHASES = 1

_BLEND_SURPLUS_RATIO = 1.005
_LARGEST_SEED = 2**32 - 1
_LARGEST_COUNT = 2**53
_LARGEST_WEIGHT_SUM = 1 + 1e-6


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
        tokens: tokens in them; for rows, the sample length for each of them; for documents, the sample length for each
            sample of a pass.
        is_rows: whether each of them is a row that is a sample by itself, as in Parquet windows and document stores.
        is_mapped: whether they are documents that are cut into samples by a map of their own, see `sentence_map.py`.
    """

    prefix: str
    fingerprint: str
    first: int
    last: int
    tokens: int
    segments: tuple[Segment, ...] = ()
    is_rows: bool = False
    is_mapped: bool = False

    @property
    def rows(self) -> int:
        """Samples in all segments."""
        return sum(segment.rows for segment in self.segments)

    def pass_samples(self, sequence_length: int) -> int:
        """Samples that one pass over it makes; of a token file, one stream over all passes, the ones that fit."""
        if self.is_mapped:
            return self.tokens // sequence_length
        return self.last - self.first if self.is_rows else (self.tokens - 1) // sequence_length

    def identity(self) -> tuple[str, int, int]:
        """What makes it the same source, wherever its files are."""
        return self.fingerprint, self.first, self.last


MapRows = Callable[[SourcePlan, int, int], int]
"""The samples that the map of a source has: source, samples asked for, seed of the segment."""


@dataclass(frozen=True)
class PhaseMember:
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
    members: tuple[PhaseMember, ...]
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
    """The order of one dataset (training, one validation group, one test group) and the samples planned from it.

    Args:
        sources: every source that any phase takes part of, in the order of their first appearance.
        phases: at least one; the last one is open, each other ends where the next begins.
        samples: end of the last phase.
    """

    name: str
    sources: tuple[SourcePlan, ...]
    phases: tuple[Phase, ...]
    samples: int = 0

    @property
    def available(self) -> int:
        """Samples from the start of the run up to where a source of the last phase must end."""
        last = self.phases[-1]
        return last.first + sum(
            self.sources[member.source].rows - last.consumed_of(member.source) for member in last.members
        )

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

    def pass_samples(self, sequence_length: int) -> int:
        """Samples of one pass over all sources."""
        return sum(source.pass_samples(sequence_length) for source in self.sources)

    def extended(
        self, samples: int, sequence_length: int, seed: int, epoch_rule: str, map_rows: MapRows | None = None
    ) -> GroupPlan:
        """The same order, continued until it holds at least `samples`; never shortened.

        Args:
            map_rows: needed for sources that are mapped.
        """
        if samples <= self.samples:
            return self
        phase = self.phases[-1]
        length = samples - phase.first
        sources = list(self.sources)
        for member in phase.members:
            taken = math.ceil(length * member.weight * _BLEND_SURPLUS_RATIO) if phase.blended else length
            needed = phase.consumed_of(member.source) + taken
            source = sources[member.source]
            sources[member.source] = _extended_source(source, needed, sequence_length, seed, epoch_rule, map_rows)
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

    def epoch_of(self, consumed_samples: int) -> int:
        """The pass over the training data, from 0, that the last of this many samples belongs to."""
        return max(0, consumed_samples - 1) // self.pass_samples if self.pass_samples else 0

    @property
    def pass_samples(self) -> int:
        """Training samples of a pass: as many as all sources make in one, whatever their weights."""
        return self.train.pass_samples(self.sequence_length) if self.train else 0

    def extended(self, samples: tuple[int, int | None, int | None], map_rows: MapRows | None = None) -> DataPlan:
        """The plan extended to at least these numbers of training, validation and test samples (per group).

        None means one pass over all data of each group.

        Args:
            map_rows: needed for sources that are mapped.
        """
        settings = (self.sequence_length, self.seed, self.epoch_rule, map_rows)
        train, valid, test = samples
        return dataclasses.replace(
            self,
            train=self.train and self.train.extended(train, *settings),
            valid=tuple(group.extended(self._counted(group, valid), *settings) for group in self.valid),
            test=tuple(group.extended(self._counted(group, test), *settings) for group in self.test),
        )

    def _counted(self, group: GroupPlan, samples: int | None) -> int:
        return group.pass_samples(self.sequence_length) if samples is None else samples

    def to_json(self) -> dict[str, Any]:
        """A value of plain lists, dicts, numbers and strings; without mapped sources the one of earlier programs."""

        def kept(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
            return {name: value for name, value in pairs if name != "is_mapped" or value}

        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self, dict_factory=kept)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> DataPlan:
        """Reads what `to_json` gave.

        Raises:
            DataError: another version, or fields are missing, impossible, or at odds with each other.
        """
        version = value.get("format_version")
        if type(version) is not int or version not in (_FORMAT_WITHOUT_PHASES, FORMAT_VERSION):
            raise DataError(
                f"The stored data plan has format {printable(version)}; this version reads {_FORMAT_WITHOUT_PHASES} "
                f"and {FORMAT_VERSION}. Continue with the version of the program that wrote it, or with --finetune."
            )
        try:
            return _plan_from_json(value)
        except (KeyError, TypeError, ValueError, AttributeError) as failure:
            raise DataError(
                f"The stored data plan is incomplete ({type(failure).__name__}: {failure}). Continue from "
                "another checkpoint of the run, or start a new order with --finetune."
            ) from failure


def segment_seed(seed: int, segment: int) -> int:
    """The seed of the k-th segment: the run's own for the first (so that it is Megatron's order), a hash of it for
    later ones.
    """
    if segment == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"data segment {segment} of seed {seed}".encode()).digest()[:4], "little")


def _extended_source(
    source: SourcePlan, needed: int, sequence_length: int, seed: int, epoch_rule: str, map_rows: MapRows | None
) -> SourcePlan:
    missing = needed - source.rows
    if missing <= 0:
        return source
    own_seed = segment_seed(seed, len(source.segments))
    if source.is_mapped and map_rows is not None:
        rows = map_rows(source, missing, own_seed)
    else:
        rows = _planned_rows(source, missing, sequence_length, epoch_rule)
    segment = Segment(missing, own_seed, rows)
    return dataclasses.replace(source, segments=(*source.segments, segment))


def _plan_from_json(value: Mapping[str, Any]) -> DataPlan:
    rule = _text(value, "epoch_rule")
    if rule not in SEPARATE_BELOW_RATIO:
        raise ValueError(f"epoch_rule is {printable(rule)}, not one of {', '.join(SEPARATE_BELOW_RATIO)}")
    plan = DataPlan(
        sequence_length=_count(value, "sequence_length", 1),
        seed=_count(value, "seed", most=_LARGEST_SEED),
        epoch_rule=rule,
        train=None if value["train"] is None else _group_from_json(value["train"]),
        valid=tuple(_group_from_json(group) for group in _list(value, "valid")),
        test=tuple(_group_from_json(group) for group in _list(value, "test")),
    )
    for group in [*([plan.train] if plan.train else []), *plan.valid, *plan.test]:
        for source in group.sources:
            _check_source(source, plan)
        _check_phases(group)
    return plan


def _group_from_json(value: Mapping[str, Any]) -> GroupPlan:
    listed = _list(value, "sources")
    sources = tuple(_source_from_json(source) for source in listed)
    if "phases" in value:
        phases = tuple(_phase_from_json(phase) for phase in _list(value, "phases"))
    else:
        members = tuple(PhaseMember(place, _weight(source)) for place, source in enumerate(listed))
        phases = (Phase(0, members, blended=_truth(value, "blended")),)
    if not phases or any(member.source not in range(len(sources)) for phase in phases for member in phase.members):
        name = printable(value["name"], quoted=False)
        raise ValueError(f"group {name} has {len(phases)} phases that name sources of {len(sources)}")
    return GroupPlan(_text(value, "name"), sources, phases, _count(value, "samples"))


def _phase_from_json(value: Mapping[str, Any]) -> Phase:
    counts = _list(value, "consumed")
    return Phase(
        first=_count(value, "first"),
        members=tuple(PhaseMember(_count(member, "source"), _weight(member)) for member in _list(value, "members")),
        consumed=tuple(_count({"consumed": count}, "consumed") for count in counts),
        blended=_truth(value, "blended"),
    )


def _source_from_json(value: Mapping[str, Any]) -> SourcePlan:
    return SourcePlan(
        prefix=_text(value, "prefix"),
        fingerprint=_text(value, "fingerprint"),
        first=_count(value, "first"),
        last=_count(value, "last", 1),
        tokens=_count(value, "tokens", 1),
        segments=tuple(
            Segment(
                _count(segment, "samples", 1), _count(segment, "seed", most=_LARGEST_SEED), _count(segment, "rows", 1)
            )
            for segment in _list(value, "segments")
        ),
        is_rows=_truth(value, "is_rows") if "is_rows" in value else False,
        is_mapped=_truth(value, "is_mapped") if "is_mapped" in value else False,
    )


def _check_source(source: SourcePlan, plan: DataPlan) -> None:
    """A segment must hold the whole epochs that its samples need, so that no count alone makes an order of any size.

    The rows of a map are counted when it is made.
    """
    if source.first >= source.last:
        raise ValueError(f"a source has the range [{source.first}, {source.last})")
    for segment in source.segments:
        rows = segment.rows
        if not source.is_mapped:
            rows = _planned_rows(source, segment.samples, plan.sequence_length, plan.epoch_rule)
        if rows != segment.rows or rows < segment.samples:
            raise ValueError(
                f"a segment of {segment.samples} samples has {segment.rows} rows, and its source gives it {rows}"
            )


def _check_phases(group: GroupPlan) -> None:
    """Phases must follow each other, and their sources must have the samples that they take."""
    ends = [*(phase.first for phase in group.phases[1:]), group.samples]
    for phase, end in zip(group.phases, ends, strict=True):
        if not phase.members or end < phase.first:
            raise ValueError(f"a phase goes from sample {phase.first} to {end} with {len(phase.members)} sources")
        if sum(phase.weights) > _LARGEST_WEIGHT_SUM or len(phase.consumed) > len(group.sources):
            raise ValueError(f"the weights of a phase sum to {sum(phase.weights):.6g}")
        left = [group.sources[member.source].rows - phase.consumed_of(member.source) for member in phase.members]
        if min(left) < 0 or sum(left) < end - phase.first:
            raise ValueError(f"a phase takes {end - phase.first} samples of sources that have {sum(left)}")
    if group.phases[0].first:
        raise ValueError(f"the first phase begins at sample {group.phases[0].first}")


def _planned_rows(source: SourcePlan, samples: int, sequence_length: int, epoch_rule: str) -> int:
    """The rows of the whole epochs that a number of samples needs."""
    if not source.is_rows:
        return plan_epochs(source.tokens, sequence_length, samples, epoch_rule).samples
    epoch = source.last - source.first
    return -(-samples // epoch) * epoch


def _count(value: Mapping[str, Any], name: str, least: int = 0, most: int = _LARGEST_COUNT) -> int:
    number = value[name]
    if type(number) is not int or not least <= number <= most:
        raise ValueError(f"{name} is {printable(number)}, not an integer from {least} to {most}")
    return number


def _weight(value: Mapping[str, Any]) -> float:
    weight = value["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise ValueError(f"weight is {printable(weight)}, not a number from 0 on")
    return float(weight)


def _text(value: Mapping[str, Any], name: str) -> str:
    text = value[name]
    if not isinstance(text, str):
        raise ValueError(f"{name} is {printable(text)}, not a text")
    return text


def _truth(value: Mapping[str, Any], name: str) -> bool:
    if not isinstance(value[name], bool):
        raise ValueError(f"{name} is {printable(value[name])}, not true or false")
    return bool(value[name])


def _list(value: Mapping[str, Any], name: str) -> list[Any]:
    entries = value[name]
    if not isinstance(entries, list | tuple):
        raise ValueError(f"{name} is {printable(entries)}, not a list")
    return list(entries)
