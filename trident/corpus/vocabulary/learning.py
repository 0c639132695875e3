"""Training of vocabularies: input texts, special tokens, output files, and byte-level BPE.

Source: the files of BPE are GPT-2's (`encoder.json`, `vocab.bpe`) under their Hugging Face names: `vocab.json`
maps a token, written in printable stand-ins for bytes, to its id; `merges.txt` holds a version line and then one merge
a line, best first. The special tokens `dsgpt2` are from jisngprk/dsGPT2 `vocab_builder.py`, in its order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, DataError
from megatron.files.failures import storage_error
from megatron.files.replacing import check_writable, discard, publish_together, write_temporary
from megatron.tokenizers.gpt2 import byte_level_bpe
from megatron.tokenizers.tokenizer import GPT2_END_OF_DOCUMENT
from megatron.tokenizers.tokenizer_files import require_tokenizers
from trident.corpus.inputs.block import parse_block
from trident.corpus.inputs.input_blocks import blocks, check_inputs
from trident.corpus.inputs.input_paths import expand_inputs
from trident.corpus.inputs.lines import BadLines
from trident.corpus.workers.progress_line import ProgressLine

_BLOCK_BYTES = 1 << 20
_BYTES = 256
DSGPT2 = "dsgpt2"
_DSGPT2_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<sys>", "<usr>")
_DSGPT2_UNUSED = 100
FILES = {
    "bpe": ("-vocab.json", "-merges.txt", "-tokenizer.json"),
    "unigram": (".model", "-tokenizer.json"),
    "wordpiece": ("-vocab.txt", "-tokenizer.json"),
}


def texts_of(
    inputs: Sequence[str],
    keys: Sequence[str],
    share: float,
    skip_bad: bool,
    progress: ProgressLine | None = None,
    separator: str | None = None,
) -> Iterator[str]:
    """Yields the texts of inputs, as read by preprocessing, or a share of them.

    Args:
        share: share of the texts, in (0, 1], evenly spaced.
        separator: ends a document in plain text.

    Raises:
        ConfigError: an input is missing.
        DataError: a bad line, unless skipped.
    """
    inputs = expand_inputs(inputs, separator)
    check_inputs(inputs, keys)
    line = seen = taken = 0
    skipped = BadLines(skip_bad)
    for block in blocks(inputs, _BLOCK_BYTES, separator, keys):
        line = 0 if block.start == 0 else line
        parsed = parse_block(block, keys, skip_bad, separator)
        skipped.take(parsed.bad, parsed.bad_count, block.source, block.start, line)
        line += parsed.lines
        for texts in parsed.texts:
            for text in texts:
                seen += 1
                if taken < seen * share:
                    taken += 1
                    yield text
        if progress is not None:
            progress.advance(len(parsed.texts[0]) + parsed.bad_count, block.size, block.input_bytes)


def drawn_texts(texts: Iterable[str], count: int, seed: int) -> list[str]:
    """Returns at most `count` of the texts, uniformly sampled, in order; only these are held in memory.

    Source: Vitter, Random Sampling with a Reservoir (1985), algorithm R.
    """
    numbers = random.Random(seed)
    kept: list[tuple[int, str]] = []
    for number, text in enumerate(texts):
        if len(kept) < count:
            kept.append((number, text))
            continue
        slot = numbers.randrange(number + 1)
        if slot < count:
            kept[slot] = (number, text)
    return [text for _, text in sorted(kept)]


def special_tokens(names: Sequence[str], unused: int | None) -> tuple[str, ...]:
    """Returns the special tokens set by the flags, in the order of their ids.

    Args:
        names: tokens, or just `dsgpt2`.
        unused: number of tokens `<unused0>`, `<unused1>`, ... to add; 100 by default with `dsgpt2`.

    Raises:
        ConfigError: a token is listed twice, or could be an ordinary word.
    """
    if tuple(names) == (DSGPT2,):
        names, unused = _DSGPT2_TOKENS, _DSGPT2_UNUSED if unused is None else unused
    tokens = (*names, *(f"<unused{number}>" for number in range(unused or 0)))
    problems = []
    for token in dict.fromkeys(tokens):
        if tokens.count(token) > 1:
            problems.append(f"--special-tokens lists {token!r} twice; every token has one id.")
        elif _is_one_word(token):
            problems.append(
                f"--special-tokens {token!r} could be learned as an ordinary word of the text. Use marks and letters "
                "without spaces, like <name> or [NAME]."
            )
    if problems:
        raise ConfigError(problems)
    return tokens


def train_byte_level(
    texts: Iterable[str],
    vocab_size: int,
    min_frequency: int = 2,
    special: Sequence[str] = (),
    show_progress: bool = False,
) -> tuple[dict[str, int], list[list[str]]]:
    """Trains a vocabulary: special tokens, the 256 bytes, the merges, and the end-of-document token as the last entry.

    `<|endoftext|>` is omitted if the special tokens contain it or `</s>`.

    Args:
        vocab_size: total entries; fewer if the text has no more pairs to merge.

    Raises:
        ConfigError: the size is too small for the bytes, the special tokens and the end-of-document token.
        DataError: no text.
    """
    added = [] if {"</s>", GPT2_END_OF_DOCUMENT} & set(special) else [GPT2_END_OF_DOCUMENT]
    fixed = _BYTES + len(special) + len(added)
    if vocab_size < fixed:
        raise ConfigError(
            f"--vocab-size {vocab_size} is too small: {_BYTES} bytes and {len(special) + len(added)} special tokens "
            f"({', '.join([*special, *added][:4])}{', ...' if len(special) > 4 else ''}) need {fixed}."
        )
    reference = _trained(texts, vocab_size - len(added), min_frequency, special, show_progress)
    model = json.loads(reference.to_str())["model"]
    vocabulary: dict[str, int] = dict(sorted(model["vocab"].items(), key=lambda entry: entry[1]))
    merges = [merge.split(" ") if isinstance(merge, str) else list(merge) for merge in model["merges"]]
    if not merges and vocab_size > fixed:
        raise DataError("The input has no pair of characters frequent enough to merge; use more text (--input).")
    for token in added:
        vocabulary[token] = len(vocabulary)
    return vocabulary, merges


def byte_level_files(vocabulary: dict[str, int], merges: list[list[str]], special: Sequence[str]) -> dict[str, bytes]:
    """Returns GPT-2's two files and an equivalent tokenizer.json, which matches special tokens inside texts."""
    reference = byte_level_bpe(vocabulary, [(left, right) for left, right in merges])
    marked = [*special, *(token for token in (GPT2_END_OF_DOCUMENT,) if token in vocabulary and token not in special)]
    reference.add_special_tokens(marked)
    lines = "".join(f"{left} {right}\n" for left, right in merges)
    return {
        "-vocab.json": json.dumps(vocabulary, ensure_ascii=False).encode(),
        "-merges.txt": f"#version: 0.2\n{lines}".encode(),
        "-tokenizer.json": reference.to_str(pretty=True).encode(),
    }


def check_vocabulary_writable(prefix: str, model_type: str) -> None:
    """Checks before the training that its result can be written.

    Raises:
        StorageError: it cannot be written.
    """
    for suffix in FILES[model_type]:
        check_writable(Path(prefix + suffix))


def save_vocabulary(prefix: str, files: Mapping[str, bytes]) -> list[Path]:
    """Writes the files of a vocabulary, named by the prefix and their suffix: all of them, or none.

    Raises:
        StorageError: writing failed.
    """
    paths = [Path(prefix + suffix) for suffix in files]
    temporaries: list[Path] = []
    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        for path, content in zip(paths, files.values(), strict=True):
            temporaries.append(write_temporary(path, content, len(content)))
        publish_together(list(zip(temporaries, paths, strict=True)))
    except OSError as failure:
        raise storage_error(paths[0], failure) from failure
    finally:
        for temporary in temporaries:
            discard(temporary)
    return paths


def save_byte_level_vocabulary(prefix: str, vocabulary: dict[str, int], merges: list[list[str]]) -> tuple[Path, Path]:
    """Writes `<prefix>-vocab.json` and `<prefix>-merges.txt` only.

    Raises:
        StorageError: writing failed.
    """
    files = byte_level_files(vocabulary, merges, ())
    vocab_path, merges_path = save_vocabulary(prefix, {suffix: files[suffix] for suffix in FILES["bpe"][:2]})
    return vocab_path, merges_path


def _trained(
    texts: Iterable[str], entries: int, min_frequency: int, special: Sequence[str], show_progress: bool
) -> Any:
    require_tokenizers()
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    reference = Tokenizer(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        min_frequency=min_frequency,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=show_progress,
    )
    reference.train_from_iterator(texts, trainer)
    return reference


def _is_one_word(token: str) -> bool:
    """Returns True if byte-level BPE could merge the token in a text, because its split rule keeps it whole."""
    from tokenizers import pre_tokenizers

    return token.split() != [token] or len(pre_tokenizers.ByteLevel(False).pre_tokenize_str(token)) < 2
