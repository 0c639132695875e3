"""What a run asks of its data, in one value."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megatron.config import DataConfig
from megatron.config.objective.masking import SENTENCES
from megatron.data.datasets.examples.example_options import ExampleOptions
from megatron.data.datasets.masked.masked_options import MaskedOptions
from megatron.data.datasets.masked.vocabulary import MaskedVocabulary
from megatron.data.order.index_cache import INDEX_CACHE_FOLDER, IndexCache
from megatron.data.order.plan import DataPlan
from megatron.data.sources.store_rows import DocumentEncoder
from megatron.errors import ConfigError
from megatron.tokenizers.tokenizer import Tokenizer


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
    def encoder(self) -> DocumentEncoder:
        """What turns the documents of stores into samples.

        Raises:
            ConfigError: there is no tokenizer, or it has no end-of-document token.
        """
        if self.tokenizer is None:
            raise ConfigError(
                "A document store is encoded while it is read, which needs a tokenizer (--tokenizer-type)."
            )
        return DocumentEncoder(self.tokenizer, self.sequence_length)

    @cached_property
    def masked_vocabulary(self) -> MaskedVocabulary:
        """What masked samples show and hide.

        Raises:
            ConfigError: there is no tokenizer, or it lacks a token.
        """
        if self.tokenizer is None:
            raise ConfigError("Masked samples need a tokenizer, whose mask token they show (--tokenizer-type).")
        needs_all = self.masked is not None and self.masked.masking.masked_samples == SENTENCES
        return MaskedVocabulary.of(self.tokenizer, needs_all=needs_all)
