"""From the data flags to the training, validation and test data sets of a run, and the plan that fixes their order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron import log
from megatron.config.data import DataConfig, WeightedGroup, read_blend, shown_split
from megatron.data.blend import BlendedDataset, blend_order
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.index_cache import IndexCache
from megatron.data.index_map import Indices, build_indices
from megatron.data.indexed import IndexedDataset
from megatron.data.plan import DataPlan, GroupPlan, Segment, SourcePlan
from megatron.data.splits import fraction_range, split_boundaries
from megatron.errors import ConfigError, DataError

_SPLIT_NAMES = ("train", "valid", "test")


class SampleDataset(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, sample: int) -> np.ndarray:
        """Token ids int64 [s + 1]."""

    def locate(self, sample: int, position: int) -> str:
        """Where a token of a sample is stored, in words."""


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
    samples: tuple[int, int, int],
    plan: DataPlan | None = None,
    build_indices: bool = True,
) -> tuple[SplitDatasets, DataPlan]:
    """Opens the token files and gives the data sets of all splits.

    Args:
        sequence_length: tokens of a sample, without the one that is only a label.
        samples: training, validation and test samples the run needs in all (the latter two per group).
        plan: the stored plan of the run that is resumed; its order is kept and, if need be, continued.
        build_indices: whether this process writes missing indices; true on one process per node, which goes first.

    Raises:
        DataError: a file is missing or damaged, training has no data, or the stored plan is of other data.
        ConfigError: two evaluation groups share a name.
    """
    files = _OpenFiles()
    fresh = _fresh_plan(data, sequence_length, seed, files)
    current = _continued(fresh, plan) if plan else fresh
    current = current.extended(samples)
    if samples[0] and current.train is None:
        raise DataError(_no_training_data_text(data))
    caches = _Caches(data.data_cache_path, build_indices)
    wanted = [*([current.train] if samples[0] and current.train else []), *current.valid, *current.test]
    built = {id(group): _build_group(group, current, files, caches) for group in wanted if group.samples}
    datasets = SplitDatasets(
        train=built.get(id(current.train)),
        valid={group.name: built[id(group)] for group in current.valid if group.samples},
        test={group.name: built[id(group)] for group in current.test if group.samples},
    )
    return datasets, current


def data_fingerprint(data: DataConfig) -> dict[str, Any]:
    """What identifies the token files, for a checkpoint's manifest: per prefix sizes, dtype and fingerprint."""
    return {prefix: dict(_file_facts(prefix)) for prefix in data_prefixes(data)}


def data_prefixes(data: DataConfig) -> list[str]:
    """The token files that the data flags name, each once."""
    prefixes = [prefix for _, prefix in read_blend(data.data_path, "--data-path")]
    groups = (*data.train_groups, *data.valid_groups, *data.test_groups)
    prefixes += [entry.prefix for group in groups for entry in group.entries]
    return list(dict.fromkeys(prefixes))


def check_files_exist(data: DataConfig) -> None:
    """Looks for the token files by name only, so that a wrong prefix is refused before anything heavy is imported.

    Raises:
        DataError: a file of a pair is missing.
    """
    for prefix in data_prefixes(data):
        if not all(Path(prefix + suffix).is_file() for suffix in (".idx", ".bin")):
            IndexedDataset(prefix)  # knows what to say


def describe(datasets: SplitDatasets, plan: DataPlan) -> list[str]:
    """One line per source for the log: what the planned order takes from it, in samples, share and epochs."""
    pairs = [(plan.train, datasets.train)]
    pairs += [(group, datasets.valid.get(group.name)) for group in plan.valid]
    pairs += [(group, datasets.test.get(group.name)) for group in plan.test]
    lines = []
    for group, dataset in pairs:
        if group is None or dataset is None:
            continue
        taken = dataset.taken if isinstance(dataset, BlendedDataset) else (group.samples,)
        for source, count in zip(group.sources, taken, strict=True):
            epochs = count * plan.sequence_length / source.tokens
            lines.append(
                f"{group.name}: {source.prefix} [{source.first}, {source.last}): {count:,} samples "
                f"({count / sum(taken):.2%}, asked {source.weight:.2%}), {epochs:.2f} epochs of {source.tokens:,} "
                "tokens"
            )
    return lines


@functools.lru_cache(maxsize=1024)
def _file_facts(prefix: str) -> tuple[tuple[str, int | str], ...]:
    """Facts of a token file; kept, since every save asks for them and a run's files do not change."""
    indexed = IndexedDataset(prefix)
    return (
        ("sequences", len(indexed)),
        ("tokens", indexed.tokens),
        ("dtype", indexed.dtype.name),
        ("sha256", indexed.fingerprint),
    )


class _OpenFiles:
    """Token files by prefix, each opened once."""

    def __init__(self) -> None:
        self._files: dict[str, IndexedDataset] = {}

    def __getitem__(self, prefix: str) -> IndexedDataset:
        if prefix not in self._files:
            self._files[prefix] = IndexedDataset(prefix)
        return self._files[prefix]


@dataclass(frozen=True)
class _Caches:
    """Where index arrays are kept: the folder the user named, else `index-cache` beside each token file."""

    directory: str | None
    build: bool

    def beside(self, prefix: str) -> IndexCache:
        if self.directory:
            return IndexCache(Path(self.directory), self.build, required=True)
        return IndexCache(Path(prefix).parent / "index-cache", self.build)


@dataclass(frozen=True)
class _Range:
    """Sequences [first, last) of a token file with a weight that is not normalised yet."""

    prefix: str
    weight: float
    first: int
    last: int


def _fresh_plan(data: DataConfig, sequence_length: int, seed: int, files: _OpenFiles) -> DataPlan:
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


def _cut_groups(data: DataConfig, files: _OpenFiles) -> dict[str, list[GroupPlan]]:
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


def _weighted_groups(groups: Sequence[WeightedGroup], files: _OpenFiles) -> list[GroupPlan]:
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


def _group(name: str, blended: bool, ranges: Sequence[_Range], files: _OpenFiles) -> GroupPlan | None:
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
    return GroupPlan(name, blended, tuple(_source(name, part, total, files) for part in kept))


def _source(name: str, part: _Range, total_weight: float, files: _OpenFiles) -> SourcePlan:
    indexed = files[part.prefix]
    tokens = int(indexed.lengths[part.first : part.last].sum(dtype=np.int64))
    if tokens == 0:
        raise DataError(
            f"{name}: the sequences [{part.first}, {part.last}) of {part.prefix} hold no tokens. "
            "Preprocess a corpus that is not empty, or change the split."
        )
    return SourcePlan(part.prefix, indexed.fingerprint, part.first, part.last, tokens, part.weight / total_weight)


def _continued(fresh: DataPlan, stored: DataPlan) -> DataPlan:
    """The stored plan, with the prefixes that the data has now; evaluation groups that changed start over.

    Raises:
        DataError: the training data, the sequence length or the seed is another one.
    """
    for what, flag in (("sequence_length", "--seq-length"), ("seed", "--seed")):
        asked, had = getattr(fresh, what), getattr(stored, what)
        if asked != had:
            raise DataError(
                f"The order of samples was planned with {flag} {had}, this run has {flag} {asked}. Keep {had}, or "
                "start a new order with --finetune."
            )
    old, new = stored.train, fresh.train
    if old is not None and (new is None or not old.same_data(new)):
        raise DataError(
            f"The training data is not that of the run to be resumed: it had {_sources_text(old)}; now there is "
            f"{_sources_text(new)}. Use the same files, split and weights, or start a new order with --finetune."
        )
    return dataclasses.replace(
        stored,
        train=_renamed(old, new) if old and new else new,
        valid=_continued_groups(stored.valid, fresh.valid),
        test=_continued_groups(stored.test, fresh.test),
    )


def _continued_groups(stored: Sequence[GroupPlan], fresh: Sequence[GroupPlan]) -> tuple[GroupPlan, ...]:
    known = {group.name: group for group in stored}
    result = []
    for group in fresh:
        old = known.get(group.name)
        if old is not None and not old.same_data(group):
            log.warning(
                f"the evaluation data {group.name} has changed since the checkpoint; its loss is of other samples now."
            )
        result.append(_renamed(old, group) if old is not None and old.same_data(group) else group)
    return tuple(result)


def _renamed(stored: GroupPlan, fresh: GroupPlan) -> GroupPlan:
    """The stored group under the prefixes (places) of the fresh one."""
    pairs = zip(stored.sources, fresh.sources, strict=True)
    return dataclasses.replace(stored, sources=tuple(dataclasses.replace(old, prefix=new.prefix) for old, new in pairs))


def _sources_text(group: GroupPlan | None) -> str:
    if group is None:
        return "none"
    return ", ".join(
        f"{source.weight:.4g} × {source.prefix} [{source.first}, {source.last}) {source.fingerprint[:12]}"
        for source in group.sources
    )


def _no_training_data_text(data: DataConfig) -> str:
    if not (data.data_path or data.train_groups):
        return "There is no training data. Name it with --data-path PREFIX."
    asked = f"--data-path {' '.join(data.data_path)} with --split {shown_split(data.split)}"
    return (
        f"No sequences are left for training: {asked} gives the training range none. Use a larger share or a corpus "
        "with more documents."
    )


def _build_group(group: GroupPlan, plan: DataPlan, files: _OpenFiles, caches: _Caches) -> SampleDataset:
    parts = [_build_source(source, plan, files[source.prefix], caches) for source in group.sources]
    if not group.blended:
        return parts[0]
    weights = [source.weight for source in group.sources]

    def make() -> dict[str, np.ndarray]:
        sources, samples = blend_order(weights, group.samples)
        return {"source": sources, "sample": samples}

    cache = caches.beside(group.sources[0].prefix)
    arrays = cache.arrays("blend", {"weights": weights, "samples": group.samples}, make)
    return BlendedDataset(parts, arrays["source"], arrays["sample"])


def _build_source(source: SourcePlan, plan: DataPlan, indexed: IndexedDataset, caches: _Caches) -> GPTDataset:
    cache = caches.beside(source.prefix)
    segments = [_load_segment(source, segment, plan, indexed, cache) for segment in source.segments]
    return GPTDataset(indexed, plan.sequence_length, segments)


def _load_segment(
    source: SourcePlan, segment: Segment, plan: DataPlan, indexed: IndexedDataset, cache: IndexCache
) -> Indices:
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
        documents = np.arange(source.first, source.last)
        built = build_indices(
            indexed.lengths, documents, plan.sequence_length, segment.samples, segment.seed, plan.epoch_rule
        )
        return built._asdict()

    arrays = cache.arrays("gpt", description, make)
    return Indices(arrays["document"], arrays["sample"], arrays["shuffle"])
