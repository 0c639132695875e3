"""From the data flags to the training, validation and test data sets of a run, and the plan that fixes their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from megatron import log
from megatron.config import DataConfig, WeightedGroup
from megatron.config.flags.blends import read_blend, shown_split
from megatron.config.objective.loss import CAUSAL
from megatron.data.datasets.blended import BlendedDataset, PhasedDataset
from megatron.data.datasets.examples.options import ExampleOptions
from megatron.data.datasets.examples.tokens import TokenizedExamples
from megatron.data.datasets.gpt import GPTDataset
from megatron.data.datasets.masked.files import TextFile
from megatron.data.datasets.masked.options import MaskedOptions
from megatron.data.datasets.masked.sentences import SentenceDataset, SentenceFile
from megatron.data.datasets.open_files import allow_open_files
from megatron.data.datasets.pairs import TokenPairs
from megatron.data.datasets.rows import RowDataset
from megatron.data.datasets.sample import SampleDataset, SourceDataset
from megatron.data.datasets.sources import DataSources, check_source, source_facts, source_folder, token_files
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.order.blend import blend_order
from megatron.data.order.index_cache import INDEX_CACHE_FOLDER, IndexCache
from megatron.data.order.index_map import Indices, build_indices
from megatron.data.order.old_index import read_old_index
from megatron.data.order.plan import DataPlan, GroupPlan, Member, Phase, Segment, SourcePlan
from megatron.data.order.resumed_plan import resumed_plan
from megatron.data.order.splits import fraction_range, split_boundaries
from megatron.errors import ConfigError, DataError, MegatronError, joined
from megatron.secret_text import masked
from megatron.tokenizers.tokenizer import Tokenizer

_SPLIT_NAMES = ("train", "valid", "test")
_FILES_PER_PREFIX = 12  # tokens, index, three mapped arrays in each of three splits; one to spare


@dataclass(frozen=True)
class SplitDatasets:
    """The data sets of a run; a split without samples or without sequences is None or absent.

    Args:
        valid, test: data set of each named group (`valid`, `test` unless weighted groups have names of their own).
    """

    train: SampleDataset | None
    valid: Mapping[str, SampleDataset]
    test: Mapping[str, SampleDataset]


def build_split_datasets(
    data: DataConfig,
    sequence_length: int,
    seed: int,
    samples: tuple[int, int | None, int | None],
    plan: DataPlan | None = None,
    build_indices: bool = True,
    consumed: int = 0,
    tokenizer: Tokenizer | None = None,
    examples: ExampleOptions | None = None,
    masked: MaskedOptions | None = None,
) -> tuple[SplitDatasets, DataPlan]:
    """Opens the sources and gives the data sets of all splits.

    Args:
        sequence_length: tokens of a sample, without the one that is only a label.
        samples: training, validation and test samples the run needs in all (the latter two per group, None for all of
            their data once).
        plan: the stored plan of the run that is resumed; its order is kept and, if need be, continued.
        build_indices: whether this process writes missing indices; true on one process per node, which goes first.
        consumed: training samples that were consumed before; a changed blend begins there, and phases that end there
            or before are not opened.
        tokenizer: of the run; document stores and examples are encoded by it, Parquet windows must have been.
        examples: how examples become rows.
        masked: how masked samples are made; None for other objectives.

    Raises:
        DataError: a source is missing or damaged or of another layout than --data-impl says, training has no data, or
            the stored plan is of other data.
        ConfigError: two evaluation groups share a name, or Parquet windows have another length than samples.
    """
    allow_open_files(_FILES_PER_PREFIX * len(data_prefixes(data)))
    caches = _Caches(data.data_cache_path, build_indices)
    files = DataSources(sequence_length, data.data_impl, tokenizer, seed, caches.beside, examples, masked)
    fresh = _fresh_plan(data, sequence_length, seed, files)
    current = resumed_plan(fresh, plan, consumed, may_change_blend=data.change_data_blend) if plan else fresh
    current = current.extended(samples, files.map_rows)
    if samples[0] and current.train is None:
        raise DataError(_no_training_data_text(data))
    wanted = [*([current.train] if samples[0] and current.train else []), *current.valid, *current.test]
    built = {id(group): _build_group(group, current, files, caches, consumed) for group in wanted if group.samples}
    datasets = SplitDatasets(
        train=built.get(id(current.train)),
        valid={group.name: built[id(group)] for group in current.valid if group.samples},
        test={group.name: built[id(group)] for group in current.test if group.samples},
    )
    return datasets, current


def epoch_samples(
    data: DataConfig,
    sequence_length: int,
    seed: int,
    tokenizer: Tokenizer | None = None,
    examples: ExampleOptions | None = None,
    build_indices: bool = True,
    masked: MaskedOptions | None = None,
) -> int:
    """How many samples one pass over the training data makes.

    Of a token file, which is one stream over all passes, the samples that fit into one.

    Args:
        build_indices, tokenizer, examples, masked: see `build_split_datasets`.

    Raises:
        ConfigError: several sources are blended, or the data do not fill one sample; or as `build_split_datasets`.
        DataError: as `build_split_datasets`.
    """
    allow_open_files(_FILES_PER_PREFIX * len(data_prefixes(data)))
    caches = _Caches(data.data_cache_path, build_indices)
    files = DataSources(sequence_length, data.data_impl, tokenizer, seed, caches.beside, examples, masked)
    train = _fresh_plan(data, sequence_length, seed, files).train
    if train is None:
        raise DataError(_no_training_data_text(data))
    counts = [source.pass_samples(sequence_length) for source in train.sources]
    if len(counts) > 1:
        raise ConfigError(
            f"--epochs counts passes over one source, and {len(counts)} are blended for training, each of which is "
            f"passed over as often as its weight says. They have {' + '.join(map(str, counts))} samples; give "
            f"--train-samples {sum(counts)} for as many as one pass over all."
        )
    if counts[0] == 0:
        raise ConfigError(
            f"--epochs: the training data {train.sources[0].prefix} have {train.sources[0].tokens} tokens and do not "
            f"fill one sample of --seq-length {sequence_length}. Use a shorter one."
        )
    return counts[0]


def empty_splits(data: DataConfig, plan: DataPlan, *, is_evaluated: bool = False) -> list[str]:
    """A sentence for each validation or test split that was asked for and has nothing in it.

    Args:
        is_evaluated: evaluations were asked for, so that there should be something to validate on at all.
    """
    found = []
    if is_evaluated and not plan.valid and not data.valid_groups and not (data.data_path and data.split_shares[1]):
        reason = f"--split {shown_split(data.split)} gives it no share" if data.data_path else "none is named"
        found.append(
            f"there is no validation data ({reason}), so nothing is validated although --eval-interval or --eval-iters "
            "is given. Give it a share or data of its own (--valid-data-path), or --eval-iters 0 to evaluate nothing."
        )
    for name, share, asked, planned in (
        ("valid", data.split_shares[1], data.valid_groups, plan.valid),
        ("test", data.split_shares[2], data.test_groups, plan.test),
    ):
        advice = f"Give it data of its own (--{name}-data-path), or --eval-iters 0 to evaluate nothing."
        for group in asked:
            if group.name not in [one.name for one in planned]:
                found.append(
                    f"the {name} group {group.name} is empty: no sequence lies in the ranges of its sources, so it is "
                    f"not evaluated. Widen the ranges. {advice}"
                )
        if data.data_path and share and not asked and not planned:
            taken = sum(source.last - source.first for source in plan.train.sources) if plan.train else 0
            found.append(
                f"the {name} split is empty: --split {shown_split(data.split)} gives it none of the sequences of "
                f"--data-path {' '.join(data.data_path)} ({taken} are for training), so it is not evaluated. Use a "
                f"larger share or a corpus with more documents. {advice}"
            )
    return found


def data_fingerprint(data: DataConfig) -> dict[str, Any]:
    """What identifies the data, for a checkpoint's manifest: per prefix sizes and fingerprint."""
    return {masked(prefix): dict(source_facts(prefix)) for prefix in data_prefixes(data)}


def data_prefixes(data: DataConfig) -> list[str]:
    """The sources that the data flags name, each once."""
    prefixes = [prefix for _, prefix in read_blend(data.data_path, "--data-path")]
    groups = (*data.train_groups, *data.valid_groups, *data.test_groups)
    prefixes += [entry.prefix for group in groups for entry in group.entries]
    return list(dict.fromkeys(prefixes))


def token_file_prefixes(data: DataConfig) -> list[str]:
    """The same with both token files of each source of pairs."""
    return [part for prefix in data_prefixes(data) for part in token_files(prefix)]


def check_sources(data: DataConfig, sequence_length: int | None, objective: str = CAUSAL, needed_by: str = "") -> None:
    """Checks that the sources exist, so that wrong ones are refused before anything heavy is imported or built.

    Args:
        sequence_length: tokens of a sample; None if it is not known.
        needed_by: a flag that was given and is only for examples; empty if there is none.

    Raises:
        MegatronError: with all problems at once, see `check_source`.
    """
    failures: list[MegatronError] = []
    for prefix in data_prefixes(data):
        try:
            check_source(prefix, sequence_length, objective, needed_by)
        except MegatronError as failure:
            failures.append(failure)
        except OSError as failure:
            failures.append(
                DataError(
                    f"{masked(prefix)} cannot be read: {failure.strerror} ({failure.filename}). Give data that this "
                    "user can read."
                )
            )
    if failures:
        raise joined(failures)


def describe(datasets: SplitDatasets, plan: DataPlan) -> list[str]:
    """One line per source for the log: what the planned order takes from it, in samples, share and epochs."""
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
class TakenSource:
    """What the newest phase of a plan takes from one source.

    Attributes:
        name: the source's name in the log.
        weight: the share that was asked for.
        before: samples that earlier phases took.
        count: samples that this phase takes.
        ratio: the share that this is.
        epochs: passes over the source at the end, earlier phases included.
    """

    source: SourcePlan
    name: str
    weight: float
    before: int
    count: int
    ratio: float
    epochs: float


def taken_sources(group: GroupPlan, dataset: SampleDataset, sequence_length: int) -> list[TakenSource]:
    """What the newest phase of a group takes from each of its sources."""
    phase = group.phases[-1]
    newest = dataset.newest if isinstance(dataset, PhasedDataset) else dataset
    taken = newest.taken if isinstance(newest, BlendedDataset) else (group.length_of(-1),)
    names = group.source_names()
    found = []
    for member, count in zip(phase.members, taken, strict=True):
        source, before = group.sources[member.source], phase.consumed_of(member.source)
        epochs = (before + count) * sequence_length / source.tokens
        ratio = count / max(sum(taken), 1)
        found.append(TakenSource(source, names[member.source], member.weight, before, count, ratio, epochs))
    return found


def _described(group: GroupPlan, dataset: SampleDataset, sequence_length: int) -> Iterator[str]:
    """The lines of a group's last phase."""
    phase = group.phases[-1]
    name = f"{group.name} from sample {phase.first:,} on" if phase.first else group.name
    for taken in taken_sources(group, dataset, sequence_length):
        source = taken.source
        size = f"{source.last - source.first:,} rows" if source.is_rows else f"{source.tokens:,} tokens"
        if source.is_mapped:
            size = f"{source.pass_samples(sequence_length):,} samples"
        yield (
            f"{name}: {source.prefix}"
            + (f" (in the log: {taken.name})" if taken.name != PurePath(source.prefix).name else "")
            + f" [{source.first}, {source.last}): {taken.count:,} samples "
            f"({taken.ratio:.2%}, asked {taken.weight:.2%})"
            + (f" after {taken.before:,}" if taken.before else "")
            + f", {taken.epochs:.2f} epochs of {size}"
        )


@dataclass(frozen=True)
class _Caches:
    """Where index arrays are kept: the folder the user named, else `index-cache` beside each source."""

    directory: str | None
    build: bool

    def beside(self, prefix: str) -> IndexCache:
        if self.directory:
            return IndexCache(Path(self.directory), self.build, required=True)
        return IndexCache(source_folder(prefix) / INDEX_CACHE_FOLDER, self.build)


@dataclass(frozen=True)
class _Range:
    """Sequences [first, last) of a token file with a weight that is not normalised yet."""

    prefix: str
    weight: float
    first: int
    last: int


def _fresh_plan(data: DataConfig, sequence_length: int, seed: int, files: DataSources) -> DataPlan:
    """The plan of a new run, before any samples are asked of it."""
    groups = {
        "train": _weighted_groups(data.train_groups, files),
        "valid": _weighted_groups(data.valid_groups, files),
        "test": _weighted_groups(data.test_groups, files),
    }
    if data.data_path:
        cut = _cut_groups(data, files)
        groups = {name: groups[name] or cut[name] for name in _SPLIT_NAMES}
    train = groups["train"][0] if groups["train"] else None
    rule = data.index_epoch_rule
    return DataPlan(sequence_length, seed, rule, train, tuple(groups["valid"]), tuple(groups["test"]))


def _cut_groups(data: DataConfig, files: DataSources) -> dict[str, list[GroupPlan]]:
    """One group per split, each source of `--data-path` cut by `--split`."""
    pairs = read_blend(data.data_path, "--data-path")
    ranges: dict[str, list[_Range]] = {name: [] for name in _SPLIT_NAMES}
    for weight, prefix in pairs:
        bounds = split_boundaries(data.split_shares, len(files[prefix]))
        for number, name in enumerate(_SPLIT_NAMES):
            ranges[name].append(_Range(prefix, weight, bounds[number], bounds[number + 1]))
    blended = len(data.data_path) > 1
    groups = {name: _group(name, blended, ranges[name], files) for name in _SPLIT_NAMES}
    return {name: [group] if group else [] for name, group in groups.items()}


def _weighted_groups(groups: Sequence[WeightedGroup], files: DataSources) -> list[GroupPlan]:
    plans = []
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"The weighted groups {', '.join(names)} share a name; give each evaluation group a name of its own."
        )
    for group in groups:
        ranges = [
            _Range(entry.prefix, entry.weight, *fraction_range(entry.start, entry.stop, len(files[entry.prefix])))
            for entry in group.entries
        ]
        plan = _group(group.name, len(ranges) > 1, ranges, files)
        if plan:
            plans.append(plan)
    return plans


def _group(name: str, blended: bool, ranges: Sequence[_Range], files: DataSources) -> GroupPlan | None:
    """A group without its empty sources, the weights of the others summing to 1; None if all are empty."""
    kept = [part for part in ranges if part.first < part.last]
    if not kept:
        return None
    for part in ranges:
        if part not in kept:
            log.warning(
                f"{name}: {part.prefix} has no sequences in its range [{part.first}, {part.last}); it is left out and "
                f"its weight {part.weight:g} is shared by the others."
            )
    total = sum(part.weight for part in kept)
    members = tuple(Member(place, part.weight / total) for place, part in enumerate(kept))
    sources = tuple(_source(name, part, files) for part in kept)
    return GroupPlan(name, sources, (Phase(0, members, blended=blended),))


def _source(name: str, part: _Range, files: DataSources) -> SourcePlan:
    source = files[part.prefix]
    if isinstance(source, SentenceFile):
        count = len(source.table(part.first, part.last, 1, files.seed))
        tokens = count * files.sequence_length
        return SourcePlan(part.prefix, source.fingerprint, part.first, part.last, tokens, is_mapped=True)
    if isinstance(source, (TokenPairs, TokenizedExamples, TextFile)):
        rows = files.packed(source, part.first, part.last, name)
        return SourcePlan(rows.prefix, rows.fingerprint, 0, len(rows), len(rows) * files.sequence_length, is_rows=True)
    if not isinstance(source, IndexedDataset):
        tokens = (part.last - part.first) * files.sequence_length
        return SourcePlan(source.prefix, source.fingerprint, part.first, part.last, tokens, is_rows=True)
    tokens = int(source.lengths[part.first : part.last].sum(dtype=np.int64))
    if tokens == 0:
        raise DataError(
            f"{name}: the sequences [{part.first}, {part.last}) of {part.prefix} hold no tokens. "
            "Preprocess a corpus that is not empty, or change the split."
        )
    return SourcePlan(part.prefix, source.fingerprint, part.first, part.last, tokens)


def _no_training_data_text(data: DataConfig) -> str:
    if not (data.data_path or data.train_groups):
        return "There is no training data. Name it with --data-path PREFIX."
    asked = f"--data-path {' '.join(data.data_path)} with --split {shown_split(data.split)}"
    return (
        f"No sequences are left for training: {asked} gives the training range none. Use a larger share or a corpus "
        "with more documents."
    )


def _build_group(group: GroupPlan, plan: DataPlan, files: DataSources, caches: _Caches, consumed: int) -> SampleDataset:
    """The samples of a group; of the phases that were over before `consumed`, only their places."""
    firsts = [phase.first for phase in group.phases]
    last = len(firsts) - 1
    opened = [number for number in range(last) if firsts[number + 1] > consumed]
    places = sorted({member.source for number in (*opened, last) for member in group.phases[number].members})
    parts = {}
    for place in places:
        source = group.sources[place]
        part = _build_source(group.name, source, plan, files, caches)
        parts[place] = files.with_copied_prompts(part, source, plan.seed) if group is plan.train else part
    newest = _build_phase(group, last, parts, caches)
    if last == 0:
        return newest
    earlier = [_build_phase(group, number, parts, caches) if number in opened else None for number in range(last)]
    return PhasedDataset(firsts, earlier, newest)


def _build_phase(
    group: GroupPlan, number: int, parts: Mapping[int, SourceDataset], caches: _Caches
) -> SourceDataset | BlendedDataset:
    phase, length = group.phases[number], group.length_of(number)
    members = [parts[member.source] for member in phase.members]
    if not phase.blended:
        return members[0]

    def make() -> dict[str, np.ndarray]:
        sources, samples = blend_order(phase.weights, length)
        return {"source": sources, "sample": samples}

    cache = caches.beside(members[0].prefix)
    arrays = cache.arrays("blend", {"weights": phase.weights, "samples": length}, make)
    places = [member.source for member in phase.members]
    firsts = [phase.consumed_of(place) for place in places]
    return BlendedDataset(members, arrays["source"], arrays["sample"], firsts, places)


def _build_source(
    group_name: str, source: SourcePlan, plan: DataPlan, files: DataSources, caches: _Caches
) -> SourceDataset:
    opened = files.planned(source)
    if isinstance(opened, SentenceFile):
        return SentenceDataset(opened, source.first, source.last, source.segments)
    if not isinstance(opened, IndexedDataset):
        rows = RowDataset(opened, source.first, source.last, source.segments)
        return rows if files.masked is None else files.masked.masked(rows)
    cache = caches.beside(source.prefix)
    stem = f"{source.prefix}_{group_name}"
    segments = [_load_segment(stem, source, segment, plan, opened, cache) for segment in source.segments]
    return GPTDataset(opened, plan.sequence_length, segments)


def _load_segment(
    stem: str, source: SourcePlan, segment: Segment, plan: DataPlan, indexed: IndexedDataset, cache: IndexCache
) -> Indices:
    """The index arrays of a segment: our own if there are, else upstream's if they fit, else new ones."""
    description = {
        "idx_sha256": source.fingerprint,
        "first": source.first,
        "last": source.last,
        "sequence_length": plan.sequence_length,
        "samples": segment.samples,
        "seed": segment.seed,
        "epoch_rule": plan.epoch_rule,
    }

    def make() -> dict[str, np.ndarray]:
        lengths, length, samples, seed = indexed.lengths, plan.sequence_length, segment.samples, segment.seed
        if segment is source.segments[0] and plan.epoch_rule == "bigscience":
            old = read_old_index(stem, lengths, source.first, source.last, length, samples, seed)
            if old is not None:
                return old._asdict()
        wide = source.last > np.iinfo(np.int32).max
        documents = np.arange(source.first, source.last, dtype=np.int64 if wide else np.int32)
        return build_indices(lengths, documents, length, samples, seed, plan.epoch_rule, source.tokens)._asdict()

    arrays = cache.arrays("gpt", description, make)
    return Indices(arrays["document"], arrays["sample"], arrays["shuffle"])
