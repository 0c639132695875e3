"""The data plan: the definition of a run's sample order, small enough for a checkpoint.

Megatron's order depends on the number of requested samples, so requesting more on a resume repeats and skips data. Here
the order of each source is a list of segments. The first one is Megatron's order for the samples planned at the start;
an extended run appends a segment of whole epochs with another seed, and a segment is used up before the next begins.
Planned samples are never reordered.

The mix of sources is a list of phases. A run has one, unless its blend is changed at a resume: then a phase with the
new weights begins at the consumed samples of that checkpoint, and the earlier phases stay as they were. In the new
phase an existing source continues where it stopped, so its samples are neither skipped nor repeated within an epoch; a
new source begins at its first sample; a removed source is remembered, and continues where it stopped if it comes back.
A phase is defined by its first sample, its weights and the consumed counts; all are stored, so every resume
from one checkpoint gives the same order.
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
    """Consecutive whole epochs over one source, ordered by Megatron's algorithm.

    Args:
        samples: samples requested when the segment was planned.
        seed: seed of its shuffles.
        rows: samples in its whole epochs; all of them belong to the order.
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
        tokens: tokens in them; for rows, rows times sample length; for mapped documents, samples of a pass times
            sample length.
        is_rows: each sequence is a sample by itself, as in Parquet windows and document stores.
        is_mapped: a map cuts the documents into samples, see `sentence_map.py`.
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
        """Returns the samples of one pass; a token file is one stream over all passes, so only whole ones count."""
        if self.is_mapped:
            return self.tokens // sequence_length
        return self.last - self.first if self.is_rows else (self.tokens - 1) // sequence_length

    def identity(self) -> tuple[str, int, int]:
        """Returns the key that identifies the source, independent of the location of its files."""
        return self.fingerprint, self.first, self.last


MapRows = Callable[[SourcePlan, int, int], int]
"""Returns the number of samples in a source's map, given the source, requested samples and the segment's seed."""


@dataclass(frozen=True)
class PhaseMember:
    """A source used by a phase.

    Args:
        source: its index in the sources of the group.
        weight: its share of the phase's samples; the weights of a phase sum to 1.
    """

    source: int
    weight: float


@dataclass(frozen=True)
class Phase:
    """Consecutive samples whose sources are mixed by the same weights.

    Args:
        first: its first sample, counted from the start of the run.
        consumed: samples taken from each source of the group before; 0 for sources beyond the list.
        blended: false only for a single prefix without a weight, which is planned without surplus.
    """

    first: int
    members: tuple[PhaseMember, ...]
    consumed: tuple[int, ...] = ()
    blended: bool = True

    @property
    def weights(self) -> list[float]:
        return [member.weight for member in self.members]

    def consumed_of(self, source: int) -> int:
        """Returns the samples of a source that earlier phases used."""
        return self.consumed[source] if source < len(self.consumed) else 0


@dataclass(frozen=True)
class GroupPlan:
    """The order of one dataset (training, one validation group, one test group) and the samples planned from it.

    Args:
        sources: every source used by any phase, in the order of their first appearance.
        phases: at least one; each ends where the next begins, the last one is open.
        samples: end of the last phase.
    """

    name: str
    sources: tuple[SourcePlan, ...]
    phases: tuple[Phase, ...]
    samples: int = 0

    @property
    def available(self) -> int:
        """Samples from the start of the run up to the end of the last phase's sources."""
        last = self.phases[-1]
        return last.first + sum(
            self.sources[member.source].rows - last.consumed_of(member.source) for member in last.members
        )

    def length_of(self, phase: int) -> int:
        """Returns the number of samples in a phase, given its index."""
        ends = [*(phase.first for phase in self.phases[1:]), self.samples]
        return ends[phase] - self.phases[phase].first

    def source_names(self) -> tuple[str, ...]:
        """Returns a short name for each source: the last part of its prefix, numbered from its second use on.

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
        """Returns the samples of one pass over all sources."""
        return sum(source.pass_samples(sequence_length) for source in self.sources)

    def extended(
        self, samples: int, sequence_length: int, seed: int, epoch_rule: str, map_rows: MapRows | None = None
    ) -> GroupPlan:
        """Returns the same order, continued until it holds at least `samples`; never shortened.

        Args:
            map_rows: required for mapped sources.
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
    """The complete definition of the sample order, stored as JSON in the checkpoint; extended, never reordered.

    Args:
        train: None without training data.
        valid, test: one plan per named group.
    """

    sequence_length: int
    seed: int
    epoch_rule: str
    train: GroupPlan | None
    valid: tuple[GroupPlan, ...]
    test: tuple[GroupPlan, ...]

    def epoch_of(self, consumed_samples: int) -> int:
        """Returns the pass over the training data, from 0, that the last consumed sample belongs to."""
        return max(0, consumed_samples - 1) // self.pass_samples if self.pass_samples else 0

    @property
    def pass_samples(self) -> int:
        """Training samples of one pass over all sources, whatever their weights."""
        return self.train.pass_samples(self.sequence_length) if self.train else 0

    def extended(self, samples: tuple[int, int | None, int | None], map_rows: MapRows | None = None) -> DataPlan:
        """Returns the plan extended to at least these numbers of training, validation and test samples (per group).

        None means one pass over all data of each group.

        Args:
            map_rows: required for mapped sources.
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
        """Returns the plan as JSON; `is_mapped` is omitted where false, which keeps the older format."""

        def fields(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
            return {name: value for name, value in pairs if name != "is_mapped" or value}

        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self, dict_factory=fields)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> DataPlan:
        """Reads the output of `to_json`.

        Raises:
            DataError: unsupported version, or fields are missing, invalid or inconsistent.
        """
        version = value.get("format_version")
        if type(version) is not int or version not in (_FORMAT_WITHOUT_PHASES, FORMAT_VERSION):
            raise DataError(
                f"The stored data plan has format {printable(version)}; this version reads {_FORMAT_WITHOUT_PHASES} "
                f"and {FORMAT_VERSION}. Continue with the program version that wrote it, or with --finetune."
            )
        try:
            return _plan_from_json(value)
        except (KeyError, TypeError, ValueError, AttributeError) as failure:
            raise DataError(
                f"The stored data plan is incomplete ({type(failure).__name__}: {failure}). Continue from "
                "another checkpoint of the run, or start a new order with --finetune."
            ) from failure


def segment_seed(seed: int, segment: int) -> int:
    """Returns the seed of a segment, given its index."""
    if segment == 0:
        return seed  # Megatron's order
    return int.from_bytes(hashlib.sha256(f"data segment {segment} of seed {seed}".encode()).digest()[:4], "little")


def _extended_source(
    source: SourcePlan, needed: int, sequence_length: int, seed: int, epoch_rule: str, map_rows: MapRows | None
) -> SourcePlan:
    missing = needed - source.rows
    if missing <= 0:
        return source
    new_seed = segment_seed(seed, len(source.segments))
    if source.is_mapped and map_rows is not None:
        rows = map_rows(source, missing, new_seed)
    else:
        rows = _planned_rows(source, missing, sequence_length, epoch_rule)
    segment = Segment(missing, new_seed, rows)
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
        members = tuple(PhaseMember(index, _weight(source)) for index, source in enumerate(listed))
        phases = (Phase(0, members, blended=_bool(value, "blended")),)
    if not phases or any(member.source not in range(len(sources)) for phase in phases for member in phase.members):
        name = printable(value["name"], quoted=False)
        raise ValueError(f"group {name} has {len(phases)} phases, which must refer to its {len(sources)} sources")
    return GroupPlan(_text(value, "name"), sources, phases, _count(value, "samples"))


def _phase_from_json(value: Mapping[str, Any]) -> Phase:
    counts = _list(value, "consumed")
    return Phase(
        first=_count(value, "first"),
        members=tuple(PhaseMember(_count(member, "source"), _weight(member)) for member in _list(value, "members")),
        consumed=tuple(_count({"consumed": count}, "consumed") for count in counts),
        blended=_bool(value, "blended"),
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
        is_rows=_bool(value, "is_rows") if "is_rows" in value else False,
        is_mapped=_bool(value, "is_mapped") if "is_mapped" in value else False,
    )


def _check_source(source: SourcePlan, plan: DataPlan) -> None:
    # A segment must hold the whole epochs that its samples need, so that no forged count makes an order of any size.
    # The rows of a map are counted when it is built.
    if source.first >= source.last:
        raise ValueError(f"a source has the range [{source.first}, {source.last})")
    for segment in source.segments:
        rows = segment.rows
        if not source.is_mapped:
            rows = _planned_rows(source, segment.samples, plan.sequence_length, plan.epoch_rule)
        if rows != segment.rows or rows < segment.samples:
            raise ValueError(
                f"a segment of {segment.samples} samples has {segment.rows} rows, but its source provides {rows}"
            )


def _check_phases(group: GroupPlan) -> None:
    # Phases must follow each other, and their sources must have the samples that they use.
    ends = [*(phase.first for phase in group.phases[1:]), group.samples]
    for phase, end in zip(group.phases, ends, strict=True):
        if not phase.members or end < phase.first:
            raise ValueError(f"a phase spans samples {phase.first} to {end} with {len(phase.members)} sources")
        if sum(phase.weights) > _LARGEST_WEIGHT_SUM or len(phase.consumed) > len(group.sources):
            raise ValueError(f"the weights of a phase sum to {sum(phase.weights):.6g}")
        left = [group.sources[member.source].rows - phase.consumed_of(member.source) for member in phase.members]
        if min(left) < 0 or sum(left) < end - phase.first:
            raise ValueError(f"a phase takes {end - phase.first} samples from sources that have {sum(left)}")
    if group.phases[0].first:
        raise ValueError(f"the first phase begins at sample {group.phases[0].first}")


def _planned_rows(source: SourcePlan, samples: int, sequence_length: int, epoch_rule: str) -> int:
    """Returns the rows of the whole epochs that a number of samples needs."""
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
        raise ValueError(f"weight is {printable(weight)}, not a non-negative number")
    return float(weight)


def _text(value: Mapping[str, Any], name: str) -> str:
    text = value[name]
    if not isinstance(text, str):
        raise ValueError(f"{name} is {printable(text)}, not a string")
    return text


def _bool(value: Mapping[str, Any], name: str) -> bool:
    if not isinstance(value[name], bool):
        raise ValueError(f"{name} is {printable(value[name])}, not true or false")
    return bool(value[name])


def _list(value: Mapping[str, Any], name: str) -> list[Any]:
    entries = value[name]
    if not isinstance(entries, list | tuple):
        raise ValueError(f"{name} is {printable(entries)}, not a list")
    return list(entries)
