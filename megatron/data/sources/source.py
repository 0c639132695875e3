"""The data request of a run, and the interface of a data source."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megatron.config import DataConfig
from megatron.config.objective.loss import CAUSAL, MASKED, MULTITASK, PREFIX
from megatron.config.objective.masking import SENTENCES
from megatron.data.datasets.examples.example_options import ExampleOptions
from megatron.data.datasets.masked.masked_options import MaskedOptions
from megatron.data.datasets.masked.vocabulary import MaskedVocabulary
from megatron.data.datasets.sample import SampleDataset
from megatron.data.order.index_cache import INDEX_CACHE_FOLDER, IndexCache
from megatron.data.order.plan import DataPlan, GroupPlan, SourcePlan
from megatron.errors import ConfigError, DataError
from megatron.secret_text import masked
from megatron.tokenizers.tokenizer import Tokenizer

Facts = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True)
class DataRequest:
    """The data requirements of a run.

    Args:
        sequence_length: inputs of a sample.
        samples: total training, validation and test samples of the run (the latter two per group, None for one pass
            over their data).
        stored: the stored plan of a resumed run; its order is kept and, if necessary, continued.
        build_indices: this process writes missing indices; true on one process per node, which goes first.
        consumed: training samples consumed before; a changed blend begins there, and phases that end by then are not
            opened.
        tokenizer: encodes document stores and examples; Parquet windows must have been encoded with an equal one.
        examples: options for turning examples into rows.
        masked: options of masked samples; None for other objectives.
    """

    data: DataConfig
    sequence_length: int
    seed: int
    samples: tuple[int, int | None, int | None] = (0, 0, 0)
    stored: DataPlan | None = None
    build_indices: bool = True
    consumed: int = 0
    tokenizer: Tokenizer | None = None
    examples: ExampleOptions = field(default_factory=ExampleOptions)
    masked: MaskedOptions | None = None

    def cache_beside(self, folder: Path) -> IndexCache:
        """Returns the cache for data in a folder: the folder set by `--data-cache-path`, else `index-cache` in it."""
        if self.data.data_cache_path:
            return IndexCache(Path(self.data.data_cache_path), self.build_indices, required=True)
        return IndexCache(folder / INDEX_CACHE_FOLDER, self.build_indices)

    @cached_property
    def encoding(self) -> threading.Lock:
        """Lock held while a text is encoded, since several threads read samples."""
        return threading.Lock()

    def tokenizer_for(self, purpose: str) -> Tokenizer:
        """Returns the tokenizer; without one, raises a ConfigError that begins with `purpose`."""
        if self.tokenizer is None:
            raise ConfigError(f"{purpose} a tokenizer (--tokenizer-type).")
        return self.tokenizer

    @cached_property
    def masked_vocabulary(self) -> MaskedVocabulary:
        """The vocabulary of masked samples.

        Raises:
            ConfigError: no tokenizer, or it lacks a token.
        """
        needs_all = self.masked is not None and self.masked.masking.masked_samples == SENTENCES
        tokenizer = self.tokenizer_for("Masked samples require the mask token of")
        return MaskedVocabulary.of(tokenizer, needs_all=needs_all)


@dataclass(frozen=True)
class SourceUse:
    """The intended use of a source, as far as known before anything is opened.

    Args:
        sequence_length: inputs of a sample; None if unknown.
        needed_by: a given flag that requires examples.
        excluded_by: a given flag that cannot be combined with examples.
    """

    sequence_length: int | None
    objective: str = CAUSAL
    needed_by: str = ""
    excluded_by: str = ""


class Source(ABC):
    """The data of one prefix. Files are opened on demand."""

    is_token_file = False
    is_pairs = False
    holds_examples = False
    """True for examples with answers; reading it opens a document store."""

    def __init__(self, prefix: str, request: DataRequest) -> None:
        self.prefix = prefix
        self._request = request

    def check(self, use: SourceUse) -> None:
        """Checks that the files exist, have valid headers and fit their use.

        Raises:
            ConfigError: windows have another length, an address is invalid, pyarrow is missing, or the objective
                requires another kind of source.
            DataError: a file is missing, or the first record of a file of examples is bad.
        """
        self._check_objective(use.objective)
        check_examples(self.prefix, self.holds_examples, use)
        self._check_files(use.sequence_length)

    @abstractmethod
    def facts(self) -> Facts:
        """Returns the facts that identify the data."""

    @property
    def folder(self) -> Path:
        """The folder of the data; the current one for a database server."""
        return Path(self.prefix).parent

    @property
    def token_files(self) -> tuple[str, ...]:
        """The prefixes of its token files; other kinds return their own prefix."""
        return (self.prefix,)

    @property
    def cache(self) -> IndexCache:
        """The cache for its index arrays."""
        return self._request.cache_beside(self.folder)

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of sequences, rows, pairs or documents, the unit of `--split`."""

    @abstractmethod
    def plan(self, first: int, last: int, split: str) -> SourcePlan:
        """Returns the plan of a range, before any samples are planned.

        Args:
            split: its split, for messages.
        """

    def map_rows(self, planned: SourcePlan, samples: int, seed: int) -> int:
        """Returns the number of samples in a sentence map, see `MapRows`."""
        raise changed_rows_error(planned.prefix)

    @abstractmethod
    def dataset(self, planned: SourcePlan, group: GroupPlan, plan: DataPlan) -> SampleDataset:
        """Returns the dataset of a plan of this source.

        Raises:
            DataError: the rows were packed from a range that differs from the current flags.
        """

    @abstractmethod
    def _check_files(self, sequence_length: int | None) -> None: ...

    def _check_objective(self, objective: str) -> None:
        """Checks that an objective supports this kind of source.

        Raises:
            ConfigError: it does not.
            DataError: pairs are missing.
        """
        prefix = self.prefix
        if self.is_pairs and objective != MULTITASK:
            raise ConfigError(
                f"{prefix} names inputs and targets ({prefix}_inputs_document.idx), which --objective {objective} does "
                f"not support. Use --objective {MULTITASK} (finetune_t0_non_causal_decoder.py), or name only one of "
                "them."
            )
        if objective == MASKED and not self.is_token_file:
            raise ConfigError(
                f"{masked(prefix)} is not a token file, which --objective {MASKED} requires. Preprocess the text with "
                "tools/preprocess_data.py, and give --data-path PREFIX."
            )
        if objective == MULTITASK and not self.is_pairs:
            raise DataError(
                f"--objective {MULTITASK} requires pairs of inputs and targets: {prefix}_inputs_document.idx and "
                f"{prefix}_targets_document.idx. Create both with tools/preprocess_data.py --json-keys inputs targets "
                "--output-prefix PREFIX, and give --data-path PREFIX."
            )


def check_examples(prefix: str, is_examples: bool, use: SourceUse) -> None:
    """Checks that the flags support examples, if the source holds some, and that no flag requires them otherwise.

    Raises:
        ConfigError: they do not.
    """
    if is_examples and use.objective == PREFIX:
        raise ConfigError(
            f"{prefix} holds examples with answers, which --objective {PREFIX} does not support: its prefixes are "
            f"random. Remove the objective, or use --objective {MULTITASK} with inputs and targets as token files."
        )
    if is_examples and use.excluded_by:
        raise ConfigError(
            f"{masked(prefix)} holds examples with answers, and {use.excluded_by} cuts off the ends of samples, which "
            f"hold the answers. Remove {use.excluded_by}, or train on plain text."
        )
    if use.needed_by and not is_examples:
        raise ConfigError(
            f"{use.needed_by} requires examples with answers (chat.jsonl), which {masked(prefix)} does not hold. "
            "Remove the flag, or use only examples in --data-path."
        )


def changed_rows_error(prefix: str) -> DataError:
    """Returns the error for a plan whose rows do not match the current flags."""
    return DataError(
        f"The order of samples was planned with other ranges of {prefix} than the current flags, or its rows were "
        "packed differently. Use the same files, ranges and flags."
    )
