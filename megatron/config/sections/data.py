"""What the run reads: token files, how they are split, the tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.fields import FROM_CHECKPOINT, RUN_MUST_MATCH, flag
from megatron.config.section import ConfigSection
from megatron.errors import ConfigError

SENTENCEPIECE_TOKENIZERS = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
WORDPIECE_TOKENIZERS = ("BertWordPieceLowerCase", "BertWordPieceCase")
TOKENIZERS = (
    "GPT2BPETokenizer",
    "PretrainedFromHF",
    "HFTokenizer",
    *SENTENCEPIECE_TOKENIZERS,
    *WORDPIECE_TOKENIZERS,
)
_SHARD_NAME = re.compile(r"-\d{5,}-of-\d{5,}$")
_INDEX_RULES = ("bigscience", "nvidia")


@dataclass(frozen=True)
class WeightedPath:
    """One entry of a weighted group: `weight start:stop prefix`."""

    weight: float
    start: float
    stop: float
    prefix: str


@dataclass(frozen=True)
class WeightedGroup:
    """A named blend of parts of data sets, read from `NAME: W S:E PREFIX, W S:E PREFIX`."""

    name: str
    entries: tuple[WeightedPath, ...]


@dataclass(frozen=True)
class DataConfig(ConfigSection):
    """Token files, their split or blend, the length of a sample, and the tokenizer."""

    seq_length: int = flag(
        help="tokens per sample", spelled=("--encoder-seq-length",), at_least=1, resume=RUN_MUST_MATCH
    )
    data_path: tuple[str, ...] = flag(
        (),
        "one source, or weight source weight source ...: a prefix of token files, a quoted pattern of Parquet windows, "
        "or a document store (sqlite:///file.db?table=web, mongodb://host/database, db.json)",
        nargs="+",
    )
    split: str = flag(
        "969, 30, 1", "shares of train, validation and test when --data-path is used", resume=RUN_MUST_MATCH
    )
    train_weighted_split_paths: tuple[str, ...] = flag(
        (), 'one group "NAME: W S:E PREFIX, W S:E PREFIX" to train on', nargs="+"
    )
    valid_weighted_split_paths: tuple[str, ...] = flag((), "groups to validate on, each on its own", nargs="+")
    test_weighted_split_paths: tuple[str, ...] = flag((), "groups to test on, each on its own", nargs="+")
    train_weighted_split_paths_path: str | None = flag(None, "file that holds the training group")
    valid_weighted_split_paths_path: str | None = flag(None, "file that holds the validation groups")
    test_weighted_split_paths_path: str | None = flag(None, "file that holds the test groups")
    train_data_path: tuple[str, ...] = flag((), "prefixes (or weight prefix ...) used for training only", nargs="+")
    valid_data_path: tuple[str, ...] = flag((), "prefixes (or weight prefix ...) used for validation only", nargs="+")
    test_data_path: tuple[str, ...] = flag((), "prefixes (or weight prefix ...) used for testing only", nargs="+")
    tokenizer_type: str = flag("GPT2BPETokenizer", "tokenizer family", choices=TOKENIZERS)
    vocab_file: str | None = flag(None, "vocabulary file of the tokenizer", spelled=("--vocab",))
    merge_file: str | None = flag(None, "byte-pair merges of the tokenizer", spelled=("--merge",))
    tokenizer_name_or_path: str | None = flag(
        None,
        "folder or hub name of a Hugging Face tokenizer, or a SentencePiece .model",
        spelled=("--tokenizer-model",),
    )
    data_impl: str = flag(
        "infer",
        "on-disk format of the token files",
        choices=("lazy", "cached", "mmap", "infer"),
    )
    num_workers: int = flag(2, "0 reads batches in the training thread, more reads ahead in the background", at_least=0)
    data_cache_path: str | None = flag(None, "folder for cached indices; beside the token files if unset")
    change_data_blend: bool = flag(
        False, "a resume may go on with other training sources or weights; each source goes on where it stands"
    )
    index_epoch_rule: str = flag(
        "bigscience",
        "when a last partial epoch is shuffled apart: bigscience 0.95, nvidia 0.80",
        choices=_INDEX_RULES,
        resume=FROM_CHECKPOINT,
    )

    @property
    def split_shares(self) -> tuple[float, float, float]:
        """The shares of train, validation and test, summing to 1."""
        return read_split(self.split)

    @property
    def train_groups(self) -> tuple[WeightedGroup, ...]:
        """The blend to train on, empty when `data_path` and `split` rule."""
        return _groups(self.train_weighted_split_paths, self.train_data_path, "train")

    @property
    def valid_groups(self) -> tuple[WeightedGroup, ...]:
        """The blends to validate on, each on its own."""
        return _groups(self.valid_weighted_split_paths, self.valid_data_path, "valid")

    @property
    def test_groups(self) -> tuple[WeightedGroup, ...]:
        """The blends to test on, each on its own."""
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


def read_split(text: str) -> tuple[float, float, float]:
    """Reads `969,30,1`: shares of train, validation and test, normalised; missing ones are 0.

    Raises:
        ConfigError: a share is no number or negative, or there are more than three, or all are 0.
    """
    parts = [part.strip() for part in text.replace("/", ",").split(",")]
    try:
        shares = [float(part) for part in parts]
    except ValueError:
        raise ConfigError(f"--split {text} is not a list of numbers. Write it like 969,30,1.") from None
    if len(shares) > 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise ConfigError(
            f"--split {shown_split(text)} must be up to three shares, none negative, not all 0. Write it like 969,30,1."
        )
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    return shares[0] / total, shares[1] / total, shares[2] / total


def shown_split(text: str) -> str:
    """A split as it can be pasted behind `--split`: without the blanks that the shell would cut at."""
    return "".join(text.split())


def read_blend(words: tuple[str, ...], name: str) -> tuple[tuple[float, str], ...]:
    """Reads `PREFIX` or `WEIGHT PREFIX WEIGHT PREFIX ...` into (weight, prefix) pairs.

    Raises:
        ConfigError: an odd number of words, a weight that is no positive number, or a NUL character.
    """
    shown = " ".join(words)
    _check_no_nul(shown, name)
    if len(words) <= 1:
        return tuple((1.0, word) for word in words)
    if len(words) % 2:
        raise ConfigError(
            f"{name} {shown} has {len(words)} words. Give one prefix, or pairs of weight and prefix"
            f"{_quote_hint(words)}."
        )
    pairs = []
    for weight, prefix in zip(words[::2], words[1::2], strict=True):
        value = _number(weight)
        if value is None or not 0 < value < float("inf"):
            raise ConfigError(
                f'{name} {shown}: "{weight}" must be a positive weight, followed by its prefix{_quote_hint(words)}.'
            )
        pairs.append((value, prefix))
    return tuple(pairs)


def read_weighted_group(text: str, name: str) -> WeightedGroup:
    """Reads one group `NAME: W S:E PREFIX, W S:E PREFIX`.

    Raises:
        ConfigError: the text does not have this form or holds a NUL, or a range is not within 0 <= S < E <= 1.
    """
    _check_no_nul(text, name)
    label, colon, rest = text.partition(":")
    form = f'{name} "{text}": a group is written "NAME: WEIGHT START:STOP PREFIX, WEIGHT START:STOP PREFIX"'
    if not colon or not label.strip() or not rest.strip():
        raise ConfigError(f"{form}; the name and its colon, or the entries, are missing.")
    entries = []
    for entry in rest.split(","):
        words = entry.split()
        if len(words) != 3:
            raise ConfigError(f'{form}; the entry "{entry.strip()}" has {len(words)} words, not 3.')
        weight, (start, stop) = _number(words[0]), _range(words[1])
        if weight is None or not 0 < weight < float("inf"):
            raise ConfigError(f'{form}; the weight "{words[0]}" is no positive number.')
        if start is None or stop is None or not 0 <= start < stop <= 1:
            raise ConfigError(f'{form}; the range "{words[1]}" must be START:STOP with 0 <= START < STOP <= 1.')
        entries.append(WeightedPath(weight, start, stop, words[2]))
    return WeightedGroup(label.strip(), tuple(entries))


def _groups(texts: tuple[str, ...], paths: tuple[str, ...], split: str) -> tuple[WeightedGroup, ...]:
    if texts:
        return tuple(read_weighted_group(text, f"--{split}-weighted-split-paths") for text in texts)
    pairs = read_blend(paths, f"--{split}-data-path")
    entries = tuple(WeightedPath(weight, 0.0, 1.0, prefix) for weight, prefix in pairs)
    return (WeightedGroup(split, entries),) if entries else ()


def _quote_hint(words: tuple[str, ...]) -> str:
    """What to do when the shell has put the files in place of a pattern."""
    is_expanded = words[0].endswith(".parquet") or _SHARD_NAME.search(words[0])
    return "; a pattern of Parquet files must be quoted, so that the shell leaves it alone" if is_expanded else ""


def _check_no_nul(text: str, name: str) -> None:
    if "\0" in text:
        raise ConfigError(
            f"{name} {text!r} holds a NUL character at place {text.index(chr(0))}, which no path can hold. The file "
            "that it was read from is damaged: write it again."
        )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _range(text: str) -> tuple[float | None, float | None]:
    start, _, stop = text.partition(":")
    return _number(start), _number(stop)
