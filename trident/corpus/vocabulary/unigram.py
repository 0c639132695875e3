"""Training of Unigram vocabularies with `sentencepiece`, written as `.model` and as `tokenizer.json`.

SentencePiece's trainer is reproducible; the one of `tokenizers` is not. Texts are not normalized (no case folding, no
joining of spaces, no prefix space), and characters without a piece fall back to bytes, so there are no unknown tokens.
Only U+2581, which stands for a space, does not survive a round trip.

The two files tokenize nearly all texts alike, but break ties differently: a corpus and the runs on it must use the same
one.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron.errors import ConfigError, DataError
from megatron.tokenizers.sentencepiece_model import SPACE, SentencePieceModel, is_ordinary, read_model

_LONGEST_LINE = 4000  # characters; the trainer keeps whole lines in memory and skips longer ones
_LINE_BYTES = 4 * _LONGEST_LINE + 16
_THREADS = 8  # fixed: rounding, and so the result, depends on their number
_KNOWN = ("<unk>", "<s>", "</s>", "<pad>")
_LETTERS_OF_BYTES = "<0x123456789ABCDEF>"  # a text that looks like a byte piece must have another way to be written
_LAST_CHOICE = -1e6


def train_unigram(texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> dict[str, bytes]:
    """Trains a vocabulary: special tokens, 256 bytes, pieces from the most to the least likely.

    Args:
        vocab_size: total entries; fewer if the text has no more pieces.
        special: tokens with the ids from 0 on; `<unk>`, `<s>` and `</s>` follow if missing.

    Returns:
        The contents of its files by suffix.

    Raises:
        ConfigError: the package is missing, or the size is too small for the characters of the text.
        DataError: no text.
    """
    try:
        from sentencepiece import SentencePieceTrainer
    except ImportError as failure:
        raise ConfigError(
            "--model-type unigram requires the sentencepiece package (pip install sentencepiece); bpe and wordpiece do "
            "not."
        ) from failure
    tokens = [*special, *(token for token in ("<unk>", "<s>", "</s>") if token not in special)]
    ids = {token: tokens.index(token) if token in tokens else -1 for token in _KNOWN}
    written = io.BytesIO()
    lines = _Lines(texts)
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=written,
            model_type="unigram",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            required_chars=_LETTERS_OF_BYTES,
            max_sentence_length=_LINE_BYTES,
            control_symbols=[token for token in tokens if token not in _KNOWN],
            num_threads=_THREADS,
            minloglevel=2,
            unk_id=ids["<unk>"],
            bos_id=ids["<s>"],
            eos_id=ids["</s>"],
            pad_id=ids["<pad>"],
        )
    except RuntimeError as failure:
        if not lines.count:
            raise DataError("The input has no text to learn from; use more text (--input).") from failure
        raise ConfigError(
            f"--vocab-size {vocab_size} with {len(tokens)} special tokens does not work for this text: "
            f"{str(failure).strip().splitlines()[-1][:200]} Use another size, or more text."
        ) from failure
    model = read_model(written.getvalue())
    return {".model": written.getvalue(), "-tokenizer.json": _tokenizer_json(model, tokens).encode()}


class _Lines:
    """Lines of texts, split to the maximum length, without NUL, which the trainer rejects."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.count = 0
        self._texts = texts

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            for line in text.replace("\0", "").split("\n"):
                for start in range(0, len(line), _LONGEST_LINE):
                    part = line[start : start + _LONGEST_LINE]
                    if not part.isspace():
                        self.count += 1
                        yield part


def _tokenizer_json(model: SentencePieceModel, special: Sequence[str]) -> str:
    """Returns the model for the `tokenizers` library, which matches special tokens inside texts."""
    vocabulary = [[piece.text, piece.score if is_ordinary(piece) else _LAST_CHOICE] for piece in model.pieces]
    numbers = {piece.text: number for number, piece in enumerate(model.pieces)}
    plain: dict[str, Any] = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": numbers[token], "content": token, **plain, "special": True} for token in special],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {"type": "Unigram", "unk_id": numbers["<unk>"], "vocab": vocabulary, "byte_fallback": True},
    }
    return json.dumps(description, ensure_ascii=False, indent=1) + "\n"
