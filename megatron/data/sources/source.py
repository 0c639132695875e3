"""What a run asks of its data, and what every kind of source answers: whether it can be used, and its samples."""

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
    """What a run asks of its data.

    Args:
        sequence_length: tokens of a sample, without the one that is only a label.
        samples: training, validation and test samples the run needs in all (the latter two per group, None for all of
            their data once).
        stored: the stored plan of the run that is resumed; its order is kept and, if need be, continued.
        build_indices: whether this process writes missing indices; true on one process per node, which goes first.
        consumed: training samples that were consumed before; a changed blend begins there, and phases that end there
            or before are not opened.
        tokenizer: of the run; document stores and examples are encoded by it, Parquet windows must have been.
        examples: how examples become rows.
        masked: how masked samples are made; None for other objectives.
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
        """Where index arrays of data in a folder are kept: the folder the user named, else `index-cache` in it."""
        if self.data.data_cache_path:
            return IndexCache(Path(self.data.data_cache_path), self.build_indices, required=True)
        return IndexCache(folder / INDEX_CACHE_FOLDER, self.build_indices)

    @cached_property
    def encoding(self) -> threading.Lock:
        """Held while a text is encoded, since samples are read in several threads."""
        return threading.Lock()

    def tokenizer_for(self, purpose: str) -> Tokenizer:
        """The tokenizer; a ConfigError that begins with the purpose if there is none."""
        if self.tokenizer is None:
            raise ConfigError(f"{purpose} a tokenizer (--tokenizer-type).")
        return self.tokenizer

    @cached_property
    def masked_vocabulary(self) -> MaskedVocabulary:
        """What masked samples show and hide.

        Raises:
            ConfigError: there is no tokenizer, or it lacks a token.
        """
        needs_all = self.masked is not None and self.masked.masking.masked_samples == SENTENCES
        tokenizer = self.tokenizer_for("Masked samples show the mask token of")
        return MaskedVocabulary.of(tokenizer, needs_all=needs_all)


@dataclass(frozen=True)
class SourceUse:
    """What a source is to be used for, as far as it is known before anything is opened.

    Args:
        sequence_length: tokens of a sample; None if unknown.
        needed_by: a flag that was given and is only for examples.
        excluded_by: a flag that was given and cannot be combined with examples.
    """

    sequence_length: int | None
    objective: str = CAUSAL
    needed_by: str = ""
    excluded_by: str = ""


class Source(ABC):
    """The data that one prefix names. Files are opened when something is asked that needs them.

    Args:
        prefix: as the user named it.
    """

    is_token_file = False
    is_pairs = False
    holds_examples = False
    """Whether it is examples with answers; of a store, to be asked only where one can be opened."""

    def __init__(self, prefix: str, request: DataRequest) -> None:
        self.prefix = prefix
        self._request = request

    def check(self, use: SourceUse) -> None:
        """Checks that the files exist, begin as their formats do and fit what they are to be used for.

        Raises:
            ConfigError: windows have another length, an address cannot be read, pyarrow is missing, or the objective
                needs another kind of source.
            DataError: a file is missing, or the first record of a file of examples is bad.
        """
        self._check_objective(use.objective)
        check_examples(self.prefix, self.holds_examples, use)
        self._check_files(use.sequence_length)

    @abstractmethod
    def facts(self) -> Facts:
        """Facts that identify the data."""

    @property
    def folder(self) -> Path:
        """The folder that contains it; the current one for a database that is not a file."""
        return Path(self.prefix).parent

    @property
    def token_files(self) -> tuple[str, ...]:
        """The prefixes of the token files that it consists of; of any other kind only its own."""
        return (self.prefix,)

    @property
    def cache(self) -> IndexCache:
        """Where its index arrays are kept: the folder that the user named, or one next to the data."""
        return self._request.cache_beside(self.folder)

    @abstractmethod
    def __len__(self) -> int:
        """Sequences, rows, pairs or documents, by which it is split."""

    @abstractmethod
    def plan(self, first: int, last: int, split: str) -> SourcePlan:
        """A range of it, as a plan holds it, before any samples are asked of it.

        Args:
            split: what it is for, in messages.
        """

    def map_rows(self, planned: SourcePlan, samples: int, seed: int) -> int:
        """The samples that the map of documents that are cut into sentences has, see `MapRows`."""
        raise other_rows(planned.prefix)

    @abstractmethod
    def dataset(self, planned: SourcePlan, group: GroupPlan, plan: DataPlan) -> SampleDataset:
        """The samples of what was planned of it.

        Raises:
            DataError: it was packed from another range than the flags name now.
        """

    @abstractmethod
    def _check_files(self, sequence_length: int | None) -> None: ...

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


def other_rows(prefix: str) -> DataError:
    """The error of a plan whose rows the flags do not give now."""
    return DataError(
        f"The order of samples was planned with other ranges of {prefix} than the flags name now, or its rows were "
        "filled in another way. Use the same files, ranges and flags."
    )
