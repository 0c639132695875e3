"""Learning a byte-level BPE vocabulary from texts, and writing it as GPT-2's two files.

Source: the files are those of GPT-2 (`encoder.json`, `vocab.bpe`) under their Hugging Face names: `vocab.json` maps a
token, written in printable stand-ins for bytes, to its id; `merges.txt` holds a version line and then one merge a line,
best first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.corpus.documents import parse_block
from megatron.corpus.inputs import expand_inputs
from megatron.corpus.progress import Progress
from megatron.corpus.sources import blocks, check_inputs
from megatron.data.atomic_files import check_writable, storage_error, write_atomically
from megatron.data.tokenizer import GPT2_END_OF_DOCUMENT
from megatron.errors import ConfigError, DataError

_BLOCK_BYTES = 1 << 20
_BYTES = 256


def texts_of(
    inputs: Sequence[str], keys: Sequence[str], share: float, skip_bad: bool, progress: Progress | None = None
) -> Iterator[str]:
    """Texts of jsonl inputs, every n-th if only a share is wanted.

    Args:
        share: part of the texts that is wanted, in (0, 1].

    Raises:
        ConfigError: an input is missing.
        DataError: a bad line, unless they are skipped.
    """
    inputs = expand_inputs(inputs)
    check_inputs(inputs, keys)
    line = seen = taken = 0
    for block in blocks(inputs, _BLOCK_BYTES, keys=keys):
        line = 0 if block.start == 0 else line
        parsed = parse_block(block, keys, skip_bad)
        if parsed.bad and not skip_bad:
            bad = parsed.bad[0]
            raise DataError(
                f"{block.source}:{line + bad.line + 1}: byte offset {block.start + bad.offset}: "
                f"{bad.reason}. Mend the line, or "
                "leave such lines out with --on-bad-line skip."
            )
        line += parsed.lines
        for texts in parsed.texts:
            for text in texts:
                seen += 1
                if taken < seen * share:
                    taken += 1
                    yield text
        if progress is not None:
            progress.advance(parsed.lines, block.size, block.input_bytes)


def train_byte_level(
    texts: Iterable[str], vocab_size: int, min_frequency: int = 2
) -> tuple[dict[str, int], list[list[str]]]:
    """Learns a vocabulary: the 256 bytes, the merges, and the end-of-document token as the last entry.

    Args:
        vocab_size: entries in all; fewer come out when the text has no more pairs to merge.

    Raises:
        ConfigError: the size does not hold the bytes and the end-of-document token.
        DataError: there is no text.
    """
    if vocab_size < _BYTES + 1:
        raise ConfigError(
            f"--vocab-size {vocab_size} is too small: {_BYTES} bytes and {GPT2_END_OF_DOCUMENT} need {_BYTES + 1}."
        )
    reference = _trained(texts, vocab_size - 1, min_frequency)
    model = json.loads(reference.to_str())["model"]
    vocabulary: dict[str, int] = dict(sorted(model["vocab"].items(), key=lambda entry: entry[1]))
    merges = [merge.split(" ") if isinstance(merge, str) else list(merge) for merge in model["merges"]]
    if not merges:
        raise DataError(
            "The input holds no pair of characters that occurs often enough to be merged; give it more text (--input)."
        )
    vocabulary[GPT2_END_OF_DOCUMENT] = len(vocabulary)
    return vocabulary, merges


def vocabulary_paths(prefix: str) -> tuple[Path, Path]:
    """The two files of a vocabulary: `<prefix>-vocab.json` and `<prefix>-merges.txt`."""
    return Path(f"{prefix}-vocab.json"), Path(f"{prefix}-merges.txt")


def check_vocabulary_place(prefix: str) -> None:
    """Checks before the training that its result can be written.

    Raises:
        StorageError: it cannot.
    """
    for path in vocabulary_paths(prefix):
        check_writable(path)


def save_byte_level_vocabulary(prefix: str, vocabulary: dict[str, int], merges: list[list[str]]) -> tuple[Path, Path]:
    """Writes `<prefix>-vocab.json` and `<prefix>-merges.txt`; each appears only when it is complete.

    Raises:
        StorageError: the file system refused.
    """
    vocab_path, merges_path = vocabulary_paths(prefix)
    try:
        vocab_path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise storage_error(vocab_path, failure) from failure
    text = "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges)
    write_atomically(vocab_path, lambda stream: _write(stream, json.dumps(vocabulary, ensure_ascii=False)))
    write_atomically(merges_path, lambda stream: _write(stream, text))
    return vocab_path, merges_path


def _trained(texts: Iterable[str], entries: int, min_frequency: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    reference = Tokenizer(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        min_frequency=min_frequency,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    reference.train_from_iterator(texts, trainer)
    return reference


def _write(stream: Any, text: str) -> None:
    stream.write(text.encode("utf-8"))
