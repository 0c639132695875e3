"""Builds the datasets of a run from the data flags, and the plan that fixes the order of their samples."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NoReturn

import numpy as np

from megatron import log
from megatron.config import DataConfig, WeightedGroup
from megatron.config.flags.blends import read_blend, shown_split
from megatron.data.datasets.blended import BlendedDataset, PhasedDataset
from megatron.data.datasets.sample import SampleDataset
from megatron.data.order.blend import blend_order
from megatron.data.order.plan import DataPlan, GroupPlan, Phase, PhaseMember, SourcePlan
from megatron.data.order.resumed_plan import resumed_plan
from megatron.data.sources.source import DataRequest, Source, SourceUse, check_examples
from megatron.data.sources.source_kinds import open_source, source_facts
from megatron.errors import ConfigError, DataError, MegatronError, joined
from megatron.secret_text import masked

_SPLIT_NAMES = ("train", "valid", "test")
# Muennighoff et al. 2023, "Scaling Data-Constrained Language Models", section 6: data repeated up to 4 times is worth
# almost as much as new data; beyond 16 passes, more repetition is worth little.
_MOST_USEFUL_PASSES = 16
_OTHER_FILES = 256  # open files besides the data: libraries, connections, checkpoints
_TOKEN_FILES = 2  # per source: tokens and index
_INDEX_ARRAYS = 3  # per source and group; a memory map holds its file open


@dataclass(frozen=True)
class SplitDatasets:
    """The datasets of a run; a split without samples or without sequences is None or absent.

    Args:
        valid, test: dataset of each named group (`valid`, `test` unless weighted groups are named).
    """

    train: SampleDataset | None
    valid: Mapping[str, SampleDataset]
    test: Mapping[str, SampleDataset]


def build_split_datasets(request: DataRequest) -> tuple[SplitDatasets, DataPlan]:
    """Opens the sources and returns the datasets of all splits.

    Raises:
        DataError: a source is missing, damaged or laid out differently than --data-impl specifies, training has no
            data, or the stored plan belongs to other data.
        ConfigError: two evaluation groups share a name, or Parquet windows and samples differ in length.
    """
    data, stored, consumed = request.data, request.stored, request.consumed
    sources = DataSources(request)
    fresh = _fresh_plan(sources)
    current = resumed_plan(fresh, stored, consumed, may_change_blend=data.change_data_blend) if stored else fresh
    current = current.extended(request.samples, sources.map_rows)
    if request.samples[0] and current.train is None:
        _refuse_no_training_data(data)
    groups = [*([current.train] if request.samples[0] and current.train else []), *current.valid, *current.test]
    built = {id(group): _build_group(group, current, sources) for group in groups if group.samples}
    datasets = SplitDatasets(
        train=built.get(id(current.train)),
        valid={group.name: built[id(group)] for group in current.valid if group.samples},
        test={group.name: built[id(group)] for group in current.test if group.samples},
    )
    return datasets, current


def epoch_samples(request: DataRequest) -> int:
    """Returns the number of samples in one pass over the training data.

    A token file is one stream over all passes; its samples are the ones that fit into a single pass.

    Raises:
        ConfigError: several sources are blended, the data does not fill one sample, or as `build_split_datasets`.
        DataError: as `build_split_datasets`.
    """
    sequence_length = request.sequence_length
    train = _fresh_plan(DataSources(request)).train
    if train is None:
        _refuse_no_training_data(request.data)
    counts = [source.pass_samples(sequence_length) for source in train.sources]
    if len(counts) > 1:
        raise ConfigError(
            f"--epochs counts passes over one source, but {len(counts)} are blended for training and each is repeated "
            f"according to its weight. They have {' + '.join(map(str, counts))} samples; use "
            f"--train-samples {sum(counts)} for as many samples as one pass over all of them."
        )
    if counts[0] == 0:
        raise ConfigError(
            f"--epochs: the training data {train.sources[0].prefix} has {train.sources[0].tokens} tokens, which do not "
            f"fill one sample of --seq-length {sequence_length}. Use a shorter sequence length."
        )
    return counts[0]


def empty_splits(data: DataConfig, plan: DataPlan, *, is_evaluated: bool = False) -> list[str]:
    """Returns a notice for each requested validation or test split that is empty.

    Args:
        is_evaluated: evaluation was requested, so a missing validation set is worth a notice, too.
    """
    notices = []
    if is_evaluated and not plan.valid and not data.valid_groups and not (data.data_path and data.split_shares[1]):
        reason = f"--split {shown_split(data.split)} gives it no share" if data.data_path else "none is named"
        notices.append(
            f"no validation data ({reason}), so validation is skipped although --eval-interval or --eval-iters is "
            "given. Give it a share or separate data (--valid-data-path), or disable evaluation with --eval-iters 0."
        )
    for name, share, requested, planned in (
        ("valid", data.split_shares[1], data.valid_groups, plan.valid),
        ("test", data.split_shares[2], data.test_groups, plan.test),
    ):
        advice = f"Give it separate data (--{name}-data-path), or disable evaluation with --eval-iters 0."
        for group in requested:
            if group.name not in [entry.name for entry in planned]:
                notices.append(
                    f"the {name} group {group.name} is empty: the ranges of its sources contain no sequence, so it is "
                    f"not evaluated. Widen the ranges. {advice}"
                )
        if data.data_path and share and not requested and not planned:
            trained = sum(source.last - source.first for source in plan.train.sources) if plan.train else 0
            notices.append(
                f"the {name} split is empty: --split {shown_split(data.split)} gives it none of the sequences of "
                f"--data-path {' '.join(data.data_path)} ({trained} are for training), so it is not evaluated. Use a "
                f"larger share or a corpus with more documents. {advice}"
            )
    return notices


def data_fingerprint(data: DataConfig) -> dict[str, Any]:
    """Returns sizes and fingerprint of each prefix, which identify the data in a checkpoint's manifest."""
    return {masked(prefix): dict(source_facts(prefix)) for prefix in data_prefixes(data)}


def data_prefixes(data: DataConfig) -> list[str]:
    """Returns the sources named by the data flags, without duplicates."""
    prefixes = [prefix for _, prefix in read_blend(data.data_path, "--data-path")]
    groups = (*data.train_groups, *data.valid_groups, *data.test_groups)
    prefixes += [entry.prefix for group in groups for entry in group.entries]
    return list(dict.fromkeys(prefixes))


def token_file_prefixes(data: DataConfig) -> list[str]:
    """Returns the token files of the sources named by the data flags; a source of pairs has two."""
    return [part for prefix in data_prefixes(data) for part in open_source(prefix).token_files]


def check_sources(data: DataConfig, use: SourceUse) -> None:
    """Checks that the sources exist, before anything heavy is imported or built.

    Raises:
        MegatronError: with all problems at once, see `Source.check`.
    """
    failures: list[MegatronError] = []
    for prefix in data_prefixes(data):
        try:
            open_source(prefix).check(use)
        except MegatronError as failure:
            failures.append(failure)
        except OSError as failure:
            failures.append(
                DataError(
                    f"{masked(prefix)} cannot be read: {failure.strerror} ({failure.filename}). Check the permissions."
                )
            )
    if failures:
        raise joined(failures)


def describe(datasets: SplitDatasets, plan: DataPlan) -> list[str]:
    """Returns a log line per source: the samples, share and epochs that the planned order draws from it."""
    pairs = [(plan.train, datasets.train)]
    pairs += [(group, datasets.valid.get(group.name)) for group in plan.valid]
    pairs += [(group, datasets.test.get(group.name)) for group in plan.test]
    return [
        text
        for group, dataset in pairs
        if group is not None and dataset is not None
        for text in _described(group, dataset, plan.sequence_length)
    ]


@dataclass(frozen=True)
class SourceUsage:
    """The samples that the newest phase of a plan draws from one source.

    Attributes:
        name: the source's name in the log.
        weight: the requested share.
        before: samples drawn by earlier phases.
        count: samples drawn by this phase.
        ratio: the resulting share of this phase.
        epochs: passes over the source at the end, earlier phases included.
    """

    source: SourcePlan
    name: str
    weight: float
    before: int
    count: int
    ratio: float
    epochs: float


def source_usages(group: GroupPlan, dataset: SampleDataset, sequence_length: int) -> list[SourceUsage]:
    """Returns what the newest phase of a group draws from each of its sources."""
    phase = group.phases[-1]
    newest = dataset.newest if isinstance(dataset, PhasedDataset) else dataset
    counts = newest.taken if isinstance(newest, BlendedDataset) else (group.length_of(-1),)
    names = group.source_names()
    usages = []
    for member, count in zip(phase.members, counts, strict=True):
        source, before = group.sources[member.source], phase.consumed_of(member.source)
        epochs = (before + count) * sequence_length / source.tokens
        ratio = count / max(sum(counts), 1)
        usages.append(SourceUsage(source, names[member.source], member.weight, before, count, ratio, epochs))
    return usages


def repetition_notices(usages: Iterable[SourceUsage], sequence_length: int) -> Iterator[str]:
    """Yields a notice for each source of the training data that does not fill a sample or is repeated very often."""
    for usage in usages:
        source = usage.source
        if usage.epochs <= 1:
            continue
        repeats, advice = f"{usage.epochs:,.0f} times", "Use more text or train for fewer samples."
        if source.pass_samples(sequence_length) < 1:
            yield (
                f"the training data {source.prefix} has {source.tokens:,} tokens, which do not fill one sample of "
                f"--seq-length {sequence_length}: they are repeated {repeats}, several times in each sample. {advice} "
                "A shorter --seq-length suits short texts."
            )
        elif usage.epochs > _MOST_USEFUL_PASSES:
            yield (
                f"the {source.tokens:,} tokens of the training data {source.prefix} are repeated {repeats} in this "
                f"run. After about {_MOST_USEFUL_PASSES} passes a model mostly memorizes the text. {advice}"
            )


def _described(group: GroupPlan, dataset: SampleDataset, sequence_length: int) -> Iterator[str]:
    phase = group.phases[-1]
    name = f"{group.name} from sample {phase.first:,} on" if phase.first else group.name
    for usage in source_usages(group, dataset, sequence_length):
        source = usage.source
        size = f"{source.last - source.first:,} rows" if source.is_rows else f"{source.tokens:,} tokens"
        if source.is_mapped:
            size = f"{source.pass_samples(sequence_length):,} samples"
        yield (
            f"{name}: {source.prefix}"
            + (f" (in the log: {usage.name})" if usage.name != PurePath(source.prefix).name else "")
            + f" [{source.first}, {source.last}): {usage.count:,} samples "
            f"({usage.ratio:.2%}, target {usage.weight:.2%})"
            + (f" after {usage.before:,}" if usage.before else "")
            + f", {usage.epochs:.2f} epochs of {size}"
        )


class DataSources:
    """The sources of a run by prefix, each opened once."""

    def __init__(self, request: DataRequest) -> None:
        allow_open_files(len(data_prefixes(request.data)), uses_of(request.data))
        self.request = request
        self._sources: dict[str, Source] = {}

    def __getitem__(self, prefix: str) -> Source:
        if prefix not in self._sources:
            source, examples = open_source(prefix, self.request), self.request.examples
            use = SourceUse(None, needed_by=examples.needed_by, excluded_by=examples.excluded_by)
            check_examples(prefix, source.holds_examples, use)
            self._sources[prefix] = self._sources[masked(prefix)] = source
        return self._sources[prefix]

    def map_rows(self, planned: SourcePlan, samples: int, seed: int) -> int:
        """Returns the number of samples in the sentence map of a source, see `MapRows`."""
        return self[planned.prefix].map_rows(planned, samples, seed)


@dataclass(frozen=True)
class _Range:
    """Sequences [first, last) of a token file and their weight, not normalised yet; 0 means their number of tokens."""

    prefix: str
    weight: float
    first: int
    last: int


def _fresh_plan(sources: DataSources) -> DataPlan:
    """Returns the plan of a new run, before it is extended to any samples."""
    data = sources.request.data
    groups = {
        "train": _weighted_groups(data.train_groups, sources),
        "valid": _weighted_groups(data.valid_groups, sources),
        "test": _weighted_groups(data.test_groups, sources),
    }
    if data.data_path:
        cut = _cut_groups(data, sources)
        groups = {name: groups[name] or cut[name] for name in _SPLIT_NAMES}
    train = groups["train"][0] if groups["train"] else None
    length, seed = sources.request.sequence_length, sources.request.seed
    return DataPlan(length, seed, data.index_epoch_rule, train, tuple(groups["valid"]), tuple(groups["test"]))


def _cut_groups(data: DataConfig, sources: DataSources) -> dict[str, list[GroupPlan]]:
    """Returns one group per split, each source of `--data-path` cut by `--split`."""
    pairs = read_blend(data.data_path, "--data-path")
    ranges: dict[str, list[_Range]] = {name: [] for name in _SPLIT_NAMES}
    for weight, prefix in pairs:
        bounds = split_boundaries(data.split_shares, len(sources[prefix]))
        for number, name in enumerate(_SPLIT_NAMES):
            ranges[name].append(_Range(prefix, weight, bounds[number], bounds[number + 1]))
    blended = len(data.data_path) > 1
    groups = {name: _group(name, blended, ranges[name], sources) for name in _SPLIT_NAMES}
    return {name: [group] if group else [] for name, group in groups.items()}


def _weighted_groups(groups: Sequence[WeightedGroup], sources: DataSources) -> list[GroupPlan]:
    plans = []
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"The weighted groups {', '.join(names)} share a name; give each evaluation group a unique name."
        )
    for group in groups:
        ranges = [
            _Range(entry.prefix, entry.weight, *fraction_range(entry.start, entry.stop, len(sources[entry.prefix])))
            for entry in group.entries
        ]
        plan = _group(group.name, len(ranges) > 1, ranges, sources)
        if plan:
            plans.append(plan)
    return plans


def _group(name: str, blended: bool, ranges: Sequence[_Range], sources: DataSources) -> GroupPlan | None:
    """Returns a group without its empty sources, the other weights summing to 1; None if all sources are empty.

    A range whose documents are all empty counts as empty. Ranges without weights are weighted by their tokens.
    """
    plans = [
        sources[span.prefix].plan(span.first, span.last, name) if span.first < span.last else None for span in ranges
    ]
    planned = tuple(plan for plan in plans if plan is not None and plan.tokens)
    weights: list[float] = []
    for span, plan in zip(ranges, plans, strict=True):
        if plan is not None and plan.tokens:
            weights.append(span.weight or plan.tokens)
        elif any(plans):
            log.warning(
                f"{name}: {span.prefix} has no tokens in its range [{span.first}, {span.last}) and is skipped"
                + (f"; its weight {span.weight:g} is shared by the others." if planned and span.weight else ".")
            )
    members = tuple(PhaseMember(index, weight / sum(weights)) for index, weight in enumerate(weights))
    return GroupPlan(name, planned, (Phase(0, members, blended=blended),)) if planned else None


def _refuse_no_training_data(data: DataConfig) -> NoReturn:
    if not (data.data_path or data.train_groups):
        raise DataError("No training data. Name it with --data-path PREFIX.")
    flags = f"--data-path {' '.join(data.data_path)} with --split {shown_split(data.split)}"
    raise DataError(
        f"No tokens are left for training: {flags} gives the training range none. Use a larger share or a corpus "
        "with more documents."
    )


def _build_group(group: GroupPlan, plan: DataPlan, sources: DataSources) -> SampleDataset:
    """Builds the dataset of a group; phases that ended before the consumed samples keep only their positions."""
    firsts = [phase.first for phase in group.phases]
    last = len(firsts) - 1
    opened = [number for number in range(last) if firsts[number + 1] > sources.request.consumed]
    used = sorted({member.source for number in (*opened, last) for member in group.phases[number].members})
    planned = {index: group.sources[index] for index in used}
    parts = {index: sources[source.prefix].dataset(source, group, plan) for index, source in planned.items()}
    newest = _build_phase(group, last, parts, sources)
    if last == 0:
        return newest
    earlier = [_build_phase(group, number, parts, sources) if number in opened else None for number in range(last)]
    return PhasedDataset(firsts, earlier, newest)


def _build_phase(
    group: GroupPlan, number: int, parts: Mapping[int, SampleDataset], sources: DataSources
) -> SampleDataset:
    phase, length = group.phases[number], group.length_of(number)
    members = [parts[member.source] for member in phase.members]
    if not phase.blended:
        return members[0]

    def make() -> dict[str, np.ndarray]:
        chosen, samples = blend_order(phase.weights, length)
        return {"source": chosen, "sample": samples}

    cache = sources[members[0].prefix].cache
    arrays = cache.arrays("blend", {"weights": phase.weights, "samples": length}, make)
    indices = [member.source for member in phase.members]
    firsts = [phase.consumed_of(index) for index in indices]
    return BlendedDataset(members, arrays["source"], arrays["sample"], firsts, indices)


def split_boundaries(shares: tuple[float, float, float], size: int) -> tuple[int, int, int, int]:
    """Cuts `size` sequences into three consecutive ranges: [b0, b1), [b1, b2), [b2, b3).

    The surplus or gap that rounding leaves at the end is subtracted from all three upper boundaries, which are then
    clipped to the file.

    Args:
        shares: of training, validation and test, summing to 1.

    Source: bigscience Megatron-DeepSpeed `megatron/data/dataset_utils.py` (`get_train_valid_test_split_`).
    """
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share * size))
    surplus = bounds[3] - size
    bounds[1:] = [bound - surplus for bound in bounds[1:]]
    first, second, third, fourth = (min(max(bound, 0), size) for bound in bounds)
    return first, second, third, fourth


def fraction_range(start: float, stop: float, size: int) -> tuple[int, int]:
    """Returns the sequences that `START:STOP` of a weighted split path selects."""
    return round(start * size), round(stop * size)


def uses_of(data: DataConfig) -> int:
    """Returns the number of sources summed over all groups; those in --data-path count for each of three splits."""
    groups = (*data.train_groups, *data.valid_groups, *data.test_groups)
    return 3 * len(read_blend(data.data_path, "--data-path")) + sum(len(group.entries) for group in groups)


def allow_open_files(sources: int, uses: int) -> None:
    """Raises this process's limit of open files as far as the system allows; warns if that may be too low.

    Args:
        sources: number of distinct prefixes.
        uses: number of sources summed over all training, validation and test groups.
    """
    needed = _TOKEN_FILES * sources + _INDEX_ARRAYS * uses + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    if soft != hard:
        for limit in (hard, needed):  # some systems reject an infinite limit, although they report one
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                break
    if hard != resource.RLIM_INFINITY and hard < needed:
        log.warning(
            f"the data may need {needed} open files and this system allows {hard}: on an error about too many open "
            "files, raise the limit (ulimit -Hn) or merge some sources with tools/merge_preprocessed_data.py."
        )
