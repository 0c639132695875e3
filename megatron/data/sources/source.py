"""What every kind of data source answers for itself: whether it can be used, what a plan takes of it, its samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron.config.objective.loss import CAUSAL, MASKED, MULTITASK, PREFIX
from megatron.data.datasets.sample import SourceDataset
from megatron.data.order.index_cache import IndexCache
from megatron.data.order.plan import DataPlan, GroupPlan, SourcePlan
from megatron.data.sources.request import DataRequest
from megatron.errors import ConfigError, DataError
from megatron.secret_text import masked

Facts = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True)
class SourceUse:
    """What a source is to be used for, as far as it is known before anything is opened.

    Args:
        sequence_length: tokens of a sample; None if it is not known.
        needed_by: a flag that was given and is only for examples.
        excluded_by: a flag that was given and does not go with examples.
    """

    sequence_length: int | None
    objective: str = CAUSAL
    needed_by: str = ""
    excluded_by: str = ""


class Source(Protocol):
    """The data that one prefix names. Files are opened when something is asked that needs them."""

    prefix: str
    """As the user named it."""

    def check(self, use: SourceUse) -> None:
        """Checks that the files exist, begin as their formats do and fit what they are to be used for.

        Raises:
            ConfigError: windows have another length, an address cannot be read, pyarrow is missing, or the objective
                needs another kind of source.
            DataError: a file is missing, or the first record of a file of examples is bad.
        """

    def facts(self) -> Facts:
        """Facts that identify the data."""

    @property
    def folder(self) -> Path:
        """The folder that it lies in; the current one for a database that is not a file."""

    @property
    def token_files(self) -> tuple[str, ...]:
        """The prefixes of the token files that it consists of; of any other kind only its own."""

    @property
    def cache(self) -> IndexCache:
        """Where its index arrays are kept."""

    @property
    def holds_examples(self) -> bool:
        """Whether it is examples with answers.

        Raises:
            ConfigError, DataError, StorageError: a store cannot be opened.
        """

    def __len__(self) -> int:
        """Sequences, rows, pairs or documents, by which it is split."""

    def plan(self, first: int, last: int, split: str) -> SourcePlan:
        """A range of it, as a plan holds it, before any samples are asked of it.

        Args:
            split: what it is for, in messages.
        """

    def map_rows(self, planned: SourcePlan, samples: int, seed: int) -> int:
        """The samples that the map of documents that are cut into sentences has, see `MapRows`."""

    def dataset(self, planned: SourcePlan, group: GroupPlan, plan: DataPlan) -> SourceDataset:
        """The samples of what was planned of it.

        Raises:
            DataError: it was packed from another range than the flags name now.
        """


def check_examples(prefix: str, is_examples: bool, use: SourceUse) -> None:
    """Checks that examples are trained on causally and as a whole, and that flags for them are given with them only.

    Raises:
        ConfigError: it is not so.
    """
    if is_examples and use.objective == PREFIX:
        raise ConfigError(
            f"{prefix} holds examples with answers, which --objective {PREFIX} does not train on: its prefixes are "
            f"random. Drop the objective, or use --objective {MULTITASK} with inputs and targets as token files."
        )
    if is_examples and use.excluded_by:
        raise ConfigError(
            f"{masked(prefix)} holds examples with answers, and {use.excluded_by} cuts off the ends of samples, where "
            f"the answers are. Drop {use.excluded_by}, or train on running text."
        )
    if use.needed_by and not is_examples:
        raise ConfigError(
            f"{use.needed_by} is for examples with answers (chat.jsonl), which {masked(prefix)} does not hold. Drop "
            "the flag, or give --data-path examples only."
        )


class PrefixSource:
    """What most kinds have in common."""

    is_token_file = False
    is_pairs = False
    holds_examples = False

    def __init__(self, prefix: str, request: DataRequest) -> None:
        self.prefix = prefix
        self._request = request

    def check(self, use: SourceUse) -> None:
        """Checks the kind first, then the files."""
        self._check_objective(use.objective)
        check_examples(self.prefix, self.holds_examples, use)
        self._check_files(use.sequence_length)

    @property
    def folder(self) -> Path:
        """The folder of a path."""
        return Path(self.prefix).parent

    @property
    def token_files(self) -> tuple[str, ...]:
        """Only its own prefix."""
        return (self.prefix,)

    @property
    def cache(self) -> IndexCache:
        """The folder that the user named, or one next to the data."""
        return self._request.cache_beside(self.folder)

    def map_rows(self, planned: SourcePlan, samples: int, seed: int) -> int:
        """There is no map."""
        raise other_rows(planned.prefix)

    def _check_files(self, sequence_length: int | None) -> None:
        raise NotImplementedError

    def _check_objective(self, objective: str) -> None:
        """Checks that multitask training gets pairs, and only it, and training on masked tokens token files.

        Raises:
            ConfigError: another objective trains on this kind.
            DataError: there are no pairs.
        """
        prefix = self.prefix
        if self.is_pairs and objective != MULTITASK:
            raise ConfigError(
                f"{prefix} names inputs and targets ({prefix}_inputs_document.idx), which --objective {objective} does "
                f"not train on. Use --objective {MULTITASK} (finetune_t0_non_causal_decoder.py), or name one of the "
                "two."
            )
        if objective == MASKED and not self.is_token_file:
            raise ConfigError(
                f"{masked(prefix)} is not a token file, and --objective {MASKED} trains on token files only. "
                "Preprocess the text with tools/preprocess_data.py, and give --data-path PREFIX."
            )
        if objective == MULTITASK and not self.is_pairs:
            raise DataError(
                f"--objective {MULTITASK} trains on pairs of inputs and targets, and there is no {prefix}"
                f"_inputs_document.idx next to a {prefix}_targets_document.idx. Make both with "
                "tools/preprocess_data.py --json-keys inputs targets --output-prefix PREFIX, and give --data-path "
                "PREFIX."
            )


def other_rows(prefix: str) -> DataError:
    """The error of a plan whose rows the flags do not give now."""
    return DataError(
        f"The order of samples was planned with other ranges of {prefix} than the flags name now, or its rows were "
        "filled in another way. Use the same files, ranges and flags."
    )
