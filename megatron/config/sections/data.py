"""Data: token files and their split, sequence length, document boundaries, the tokenizer, and the random seed."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config.flags.blends import WeightedGroup, WeightedPath, read_blend, read_split, read_weighted_group
from megatron.config.flags.fields import FROM_CHECKPOINT, RUN_MUST_MATCH, flag
from megatron.config.flags.paths import PathUse
from megatron.config.flags.section import ConfigSection
from megatron.errors import ConfigError

SENTENCEPIECE_TOKENIZERS = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
WORDPIECE_TOKENIZERS = ("BertWordPieceLowerCase", "BertWordPieceCase")
NULL_TOKENIZER = "NullTokenizer"
TOKENIZERS = (
    "GPT2BPETokenizer",
    "PretrainedFromHF",
    "HFTokenizer",
    *SENTENCEPIECE_TOKENIZERS,
    *WORDPIECE_TOKENIZERS,
    NULL_TOKENIZER,
)
_NVIDIA_NAMES: Mapping[str, str] = types.MappingProxyType(
    {"HuggingFaceTokenizer": "HFTokenizer", "Llama3Tokenizer": "HFTokenizer"}
)
_INDEX_RULES = ("bigscience", "nvidia")


@dataclass(frozen=True)
class DataConfig(ConfigSection):
    """Token files, their split or blend, the sequence length, and the tokenizer."""

    seq_length: int = flag(
        help="sequence length: tokens per sample",
        spelled=("--encoder-seq-length",),
        at_least=1,
        at_most=2**31 - 1,
        resume=RUN_MUST_MATCH,
    )
    data_path: tuple[str, ...] = flag(
        (),
        "data sources, blended by size, or weight-source pairs: prefixes of token files, quoted patterns of Parquet "
        "windows, or document stores (sqlite:///file.db?table=web, mongodb://host/database, db.json)",
        nargs="+",
        once=True,
        path=PathUse.PREFIX,
    )
    split: str = flag("969, 30, 1", "train, validation and test split of --data-path", resume=RUN_MUST_MATCH)
    train_weighted_split_paths: tuple[str, ...] = flag(
        (), 'training blend "NAME: W S:E PREFIX, W S:E PREFIX"', nargs="+", once=True, path=PathUse.PREFIX
    )
    valid_weighted_split_paths: tuple[str, ...] = flag(
        (), "validation blends, each evaluated separately", nargs="+", once=True, path=PathUse.PREFIX
    )
    test_weighted_split_paths: tuple[str, ...] = flag(
        (), "test blends, each evaluated separately", nargs="+", once=True, path=PathUse.PREFIX
    )
    train_weighted_split_paths_path: str | None = flag(None, "file with the training blend", path=PathUse.SMALL_FILE)
    valid_weighted_split_paths_path: str | None = flag(None, "file with the validation blends", path=PathUse.SMALL_FILE)
    test_weighted_split_paths_path: str | None = flag(None, "file with the test blends", path=PathUse.SMALL_FILE)
    train_data_path: tuple[str, ...] = flag(
        (), "training prefixes, or weight-prefix pairs", nargs="+", once=True, path=PathUse.PREFIX
    )
    valid_data_path: tuple[str, ...] = flag(
        (), "validation prefixes, or weight-prefix pairs", nargs="+", once=True, path=PathUse.PREFIX
    )
    test_data_path: tuple[str, ...] = flag(
        (), "test prefixes, or weight-prefix pairs", nargs="+", once=True, path=PathUse.PREFIX
    )
    tokenizer_type: str = flag("GPT2BPETokenizer", "type of tokenizer", choices=TOKENIZERS, synonyms=_NVIDIA_NAMES)
    vocab_file: str | None = flag(None, "path to the vocabulary file", spelled=("--vocab",), path=PathUse.SMALL_FILE)
    merge_file: str | None = flag(None, "path to the BPE merge file", spelled=("--merge",), path=PathUse.SMALL_FILE)
    tokenizer_name_or_path: str | None = flag(
        None,
        "folder or hub name of a Hugging Face tokenizer, a SentencePiece .model, or the vocabulary size of "
        "NullTokenizer",
        spelled=("--tokenizer-model",),
        path=PathUse.FILE_OR_FOLDER,
    )
    data_impl: str = flag(
        "infer",
        "on-disk format of the token files",
        choices=("lazy", "cached", "mmap", "infer"),
    )
    num_workers: int = flag(
        2, "0 loads batches in the training thread, any other number prefetches in the background", at_least=0
    )
    data_cache_path: str | None = flag(
        None, "folder for cached index files; next to the token files if unset", path=PathUse.FOLDER
    )
    change_data_blend: bool = flag(
        False, "allow a resumed run to change its training blend; each source continues where it stopped"
    )
    index_epoch_rule: str = flag(
        "bigscience",
        "fraction of an epoch below which a partial last epoch is shuffled separately: bigscience 0.95, nvidia 0.80",
        choices=_INDEX_RULES,
        resume=FROM_CHECKPOINT,
    )

    @property
    def split_shares(self) -> tuple[float, float, float]:
        """The shares of train, validation and test, summing to 1."""
        return read_split(self.split)

    @property
    def train_groups(self) -> tuple[WeightedGroup, ...]:
        """The training blend, empty when `data_path` and `split` are used."""
        return _groups(self.train_weighted_split_paths, self.train_data_path, "train")

    @property
    def valid_groups(self) -> tuple[WeightedGroup, ...]:
        """The validation blends, each evaluated separately."""
        return _groups(self.valid_weighted_split_paths, self.valid_data_path, "valid")

    @property
    def test_groups(self) -> tuple[WeightedGroup, ...]:
        """The test blends, each evaluated separately."""
        return _groups(self.test_weighted_split_paths, self.test_data_path, "test")

    def problems(self) -> Iterator[str]:
        for read in (
            lambda: self.split_shares,
            lambda: read_blend(self.data_path, "--data-path"),
            lambda: self.train_groups,
            lambda: self.valid_groups,
            lambda: self.test_groups,
        ):
            try:
                read()
            except ConfigError as failure:
                yield from failure.problems
        if len(self.train_weighted_split_paths) > 1:
            yield (
                f"--train-weighted-split-paths has {len(self.train_weighted_split_paths)} groups, expected "
                "one. Separate its entries by commas inside one quoted argument."
            )


def _groups(texts: tuple[str, ...], paths: tuple[str, ...], split: str) -> tuple[WeightedGroup, ...]:
    if texts:
        return tuple(read_weighted_group(text, f"--{split}-weighted-split-paths") for text in texts)
    pairs = read_blend(paths, f"--{split}-data-path")
    entries = tuple(WeightedPath(weight, 0.0, 1.0, prefix) for weight, prefix in pairs)
    return (WeightedGroup(split, entries),) if entries else ()


@dataclass(frozen=True)
class DocumentConfig(ConfigSection):
    """Loss, positions and attention at document boundaries."""

    eod_mask_loss: bool = flag(False, "mask the loss where the input token is end-of-document", resume=RUN_MUST_MATCH)
    reset_position_ids: bool = flag(False, "reset position ids after each end-of-document token", resume=RUN_MUST_MATCH)
    reset_attention_mask: bool = flag(
        False,
        "reset the attention mask after each end-of-document token: no attention across documents",
        resume=RUN_MUST_MATCH,
    )

    @property
    def needs_segments(self) -> bool:
        """True if the network needs the document of each token."""
        return self.reset_position_ids or self.reset_attention_mask


@dataclass(frozen=True)
class RandomConfig(ConfigSection):
    """The seed of all random numbers."""

    seed: int = flag(
        1234,
        "random seed of weights, dropout and data order",
        at_least=1,
        at_most=2**32 - 1,  # the limit of NumPy's RandomState, which shuffles the data
        resume=RUN_MUST_MATCH,
    )


@dataclass(frozen=True)
class TokenizerFileFlags(ConfigSection):
    """Flags for the files of a tokenizer; a tool declares `--tokenizer-type` itself."""

    help_title = "tokenizer files"

    vocab_file: str | None = flag(
        None, "path to the vocabulary file (vocab.json or vocab.txt)", spelled=("--vocab",), path=PathUse.SMALL_FILE
    )
    merge_file: str | None = flag(
        None, "path to the BPE merge file (merges.txt)", spelled=("--merge",), path=PathUse.SMALL_FILE
    )
    tokenizer_name_or_path: str | None = flag(
        None,
        "folder, tokenizer.json or hub name of a Hugging Face tokenizer, or a SentencePiece .model",
        spelled=("--tokenizer-model",),
        path=PathUse.FILE_OR_FOLDER,
    )


def required_tokenizer_type() -> Any:
    """Declares `--tokenizer-type` for a tool that requires a tokenizer."""
    return flag(help="type of tokenizer", choices=TOKENIZERS)


def optional_tokenizer_type(help: str) -> Any:
    """Declares `--tokenizer-type` for a tool with an optional tokenizer."""
    return flag(None, help, choices=TOKENIZERS)
