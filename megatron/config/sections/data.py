"""What the run reads: token files, how they are split, the length of a sample, what happens between documents, the
tokenizer; and the seed of every random choice.
"""

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
    """Token files, their split or blend, the length of a sample, and the tokenizer."""

    seq_length: int = flag(
        help="tokens per sample",
        spelled=("--encoder-seq-length",),
        at_least=1,
        at_most=2**31 - 1,
        resume=RUN_MUST_MATCH,
    )
    data_path: tuple[str, ...] = flag(
        (),
        "sources, mixed by size, or weight source weight source ...: a prefix of token files, a quoted pattern of "
        "Parquet windows, or a document store (sqlite:///file.db?table=web, mongodb://host/database, db.json)",
        nargs="+",
        once=True,
        path=PathUse.PREFIX,
    )
    split: str = flag(
        "969, 30, 1", "shares of train, validation and test when --data-path is used", resume=RUN_MUST_MATCH
    )
    train_weighted_split_paths: tuple[str, ...] = flag(
        (), 'one group "NAME: W S:E PREFIX, W S:E PREFIX" to train on', nargs="+", once=True, path=PathUse.PREFIX
    )
    valid_weighted_split_paths: tuple[str, ...] = flag(
        (), "groups to validate on, each separately", nargs="+", once=True, path=PathUse.PREFIX
    )
    test_weighted_split_paths: tuple[str, ...] = flag(
        (), "groups to test on, each separately", nargs="+", once=True, path=PathUse.PREFIX
    )
    train_weighted_split_paths_path: str | None = flag(
        None, "file that holds the training group", path=PathUse.SMALL_FILE
    )
    valid_weighted_split_paths_path: str | None = flag(
        None, "file that holds the validation groups", path=PathUse.SMALL_FILE
    )
    test_weighted_split_paths_path: str | None = flag(None, "file that holds the test groups", path=PathUse.SMALL_FILE)
    train_data_path: tuple[str, ...] = flag(
        (), "prefixes (or weight prefix ...) used for training only", nargs="+", once=True, path=PathUse.PREFIX
    )
    valid_data_path: tuple[str, ...] = flag(
        (), "prefixes (or weight prefix ...) used for validation only", nargs="+", once=True, path=PathUse.PREFIX
    )
    test_data_path: tuple[str, ...] = flag(
        (), "prefixes (or weight prefix ...) used for testing only", nargs="+", once=True, path=PathUse.PREFIX
    )
    tokenizer_type: str = flag("GPT2BPETokenizer", "tokenizer family", choices=TOKENIZERS, synonyms=_NVIDIA_NAMES)
    vocab_file: str | None = flag(
        None, "vocabulary file of the tokenizer", spelled=("--vocab",), path=PathUse.SMALL_FILE
    )
    merge_file: str | None = flag(
        None, "byte-pair merges of the tokenizer", spelled=("--merge",), path=PathUse.SMALL_FILE
    )
    tokenizer_name_or_path: str | None = flag(
        None,
        "folder or hub name of a Hugging Face tokenizer, a SentencePiece .model, or the ids of NullTokenizer",
        spelled=("--tokenizer-model",),
        path=PathUse.FILE_OR_FOLDER,
    )
    data_impl: str = flag(
        "infer",
        "on-disk format of the token files",
        choices=("lazy", "cached", "mmap", "infer"),
    )
    num_workers: int = flag(
        2, "0 reads batches in the training thread; any other number reads ahead in the background", at_least=0
    )
    data_cache_path: str | None = flag(
        None, "folder for cached indices; next to the token files if unset", path=PathUse.FOLDER
    )
    change_data_blend: bool = flag(
        False, "let a resumed run change its training sources or weights; each source continues where it stopped"
    )
    index_epoch_rule: str = flag(
        "bigscience",
        "share of an epoch below which a partial last epoch is shuffled on its own: bigscience 0.95, nvidia 0.80",
        choices=_INDEX_RULES,
        resume=FROM_CHECKPOINT,
    )

    @property
    def split_shares(self) -> tuple[float, float, float]:
        """The shares of train, validation and test, summing to 1."""
        return read_split(self.split)

    @property
    def train_groups(self) -> tuple[WeightedGroup, ...]:
        """The blend to train on, empty when `data_path` and `split` are used."""
        return _groups(self.train_weighted_split_paths, self.train_data_path, "train")

    @property
    def valid_groups(self) -> tuple[WeightedGroup, ...]:
        """The blends to validate on, each separately."""
        return _groups(self.valid_weighted_split_paths, self.valid_data_path, "valid")

    @property
    def test_groups(self) -> tuple[WeightedGroup, ...]:
        """The blends to test on, each separately."""
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
                f"--train-weighted-split-paths has {len(self.train_weighted_split_paths)} groups. Training reads "
                "exactly one; separate its entries by commas inside one quoted text."
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

    eod_mask_loss: bool = flag(False, "no loss where the input token is end-of-document", resume=RUN_MUST_MATCH)
    reset_position_ids: bool = flag(False, "restart positions after each end-of-document", resume=RUN_MUST_MATCH)
    reset_attention_mask: bool = flag(False, "no attention across documents", resume=RUN_MUST_MATCH)

    @property
    def needs_segments(self) -> bool:
        """Whether the network must know which document each token belongs to."""
        return self.reset_position_ids or self.reset_attention_mask


@dataclass(frozen=True)
class RandomConfig(ConfigSection):
    """Randomness of a run."""

    seed: int = flag(
        1234,
        "seed of weights, dropout and data order",
        at_least=1,
        at_most=2**32 - 1,  # NumPy's RandomState, which shuffles the data, takes no more
        resume=RUN_MUST_MATCH,
    )


@dataclass(frozen=True)
class TokenizerFileFlags(ConfigSection):
    """The flags of a tool that name a tokenizer's files; the tool declares `--tokenizer-type` itself."""

    help_title = "files of the tokenizer"

    vocab_file: str | None = flag(
        None, "vocabulary file (vocab.json or vocab.txt)", spelled=("--vocab",), path=PathUse.SMALL_FILE
    )
    merge_file: str | None = flag(None, "byte-pair merges (merges.txt)", spelled=("--merge",), path=PathUse.SMALL_FILE)
    tokenizer_name_or_path: str | None = flag(
        None,
        "folder, tokenizer.json or hub name of a Hugging Face tokenizer, or a SentencePiece .model",
        spelled=("--tokenizer-model",),
        path=PathUse.FILE_OR_FOLDER,
    )


def required_tokenizer_type() -> Any:
    """The `--tokenizer-type` of a tool that always needs a tokenizer."""
    return flag(help="tokenizer family", choices=TOKENIZERS)


def optional_tokenizer_type(help: str) -> Any:
    """The `--tokenizer-type` of a tool that can do without a tokenizer."""
    return flag(None, help, choices=TOKENIZERS)
