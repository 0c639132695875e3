"""Parser of SentencePiece model files, and conversion of BPE models with byte fallback to `tokenizer.json`.

Source: google/sentencepiece `src/sentencepiece_model.proto` (field numbers) and `src/bpe_model.cc` (the pair whose
piece has the highest score is merged first).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SPACE = "\u2581"
_BPE = 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_BRACKETED = re.compile(r"[<\[]\S+[>\]]")
_PLAIN_KINDS = frozenset((_NORMAL, _UNKNOWN, _CONTROL, _BYTE))
_KNOWN_RULES = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf")  # none has a space after another character
_KINDS = {1: "unigram", _BPE: "bpe", 3: "word", 4: "char"}


@dataclass(frozen=True)
class VocabularyPiece:
    """One entry of the vocabulary; its index is its id."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The properties of a model that determine its ids.

    Args:
        kind: unigram, bpe, word or char.
        spaces_after: words end with the space mark, instead of beginning with it.
        changes_letters: the normalizer has rules for characters; `rules` is their name.
    """

    pieces: tuple[VocabularyPiece, ...]
    kind: str
    byte_fallback: bool
    unknown: str
    spaces_after: bool
    changes_letters: bool
    rules: str
    adds_space_before: bool
    joins_spaces: bool
    marks_spaces: bool


def read_model(content: bytes) -> SentencePieceModel:
    """Reads the contents of a `.model` file.

    Raises:
        ValueError: not a model.
    """
    try:
        return _read(content)
    except (IndexError, TypeError, AttributeError, struct.error) as failure:
        raise ValueError(f"its file cannot be read here ({type(failure).__name__}: {failure})") from failure


def is_ordinary(piece: VocabularyPiece) -> bool:
    """Returns True for a piece of text; the others are bytes, control tokens and the unknown one."""
    return piece.kind == _NORMAL


def is_special(piece: VocabularyPiece) -> bool:
    """Returns True for a control piece, the unknown piece or a user-defined token in brackets."""
    return piece.kind in (_UNKNOWN, _CONTROL) or (
        piece.kind == _USER_DEFINED and _BRACKETED.fullmatch(piece.text) is not None
    )


def needs_normalizing(model: SentencePieceModel) -> bool:
    """Returns True if texts must pass the model's normalizer before `tokenizer_json` encodes them."""
    return model.changes_letters or model.joins_spaces


def can_cut_before_spaces(model: SentencePieceModel) -> bool:
    """Returns True if a space after a non-space always begins a new piece, so that texts may be cut there."""
    # Unigram models qualify in theory, but rounded score sums differ over a very long text.
    known = {piece.text for piece in model.pieces if is_ordinary(piece)}
    return (
        model.kind == "bpe"
        and {piece.kind for piece in model.pieces} <= _PLAIN_KINDS
        and SPACE in known
        and not any(SPACE in text.lstrip(SPACE) for text in known)
        and model.marks_spaces
        and not model.spaces_after
        and (not model.changes_letters or (model.rules in _KNOWN_RULES and model.joins_spaces))
    )


def tokenizer_json(model: SentencePieceModel) -> tuple[str | None, str]:
    """Converts a model to the contents of a `tokenizer.json`; returns None and a reason if impossible.

    Rules for characters and runs of spaces are omitted: other libraries apply them differently, so SentencePiece
    normalizes the texts first (see `needs_normalizing`).
    """
    kinds = {piece.kind for piece in model.pieces}
    reason = ""
    if model.kind != "bpe":
        reason = f"no faster library reads {model.kind} models"
    elif not model.byte_fallback:
        reason = "no faster library reads models without byte fallback"
    elif not kinds <= _PLAIN_KINDS:
        reason = "it has user-defined or unused pieces"
    elif model.spaces_after or not model.marks_spaces:
        reason = "it marks spaces in an unusual way"
    if reason:
        return None, reason
    description: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None if needs_normalizing(model) else _normalizer(model),
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "unk_token": model.unknown,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece.text: number for number, piece in enumerate(model.pieces)},
            "merges": _merges(model),
        },
    }
    return json.dumps(description, ensure_ascii=False), ""


def _read(content: bytes) -> SentencePieceModel:
    pieces = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(content):
        if number == 1:
            fields = dict(_fields(value))
            score = struct.unpack("<f", fields[2])[0] if 2 in fields else 0.0
            pieces.append(VocabularyPiece(fields.get(1, b"").decode(), score, fields.get(3, _NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    return SentencePieceModel(
        pieces=tuple(pieces),
        kind=_KINDS.get(trainer.get(3, 1), "unknown"),
        byte_fallback=bool(trainer.get(35, 0)),
        unknown=trainer.get(45, b"<unk>").decode(),
        spaces_after=bool(trainer.get(24, 0)),
        changes_letters=bool(normalizer.get(2, b"")),
        rules=normalizer.get(1, b"").decode(),
        adds_space_before=bool(normalizer.get(3, 1)),
        joins_spaces=bool(normalizer.get(4, 1)),
        marks_spaces=bool(normalizer.get(5, 1)),
    )


def _normalizer(model: SentencePieceModel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if model.adds_space_before else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Returns every split of a piece into two others, the best piece first."""
    scores = {piece.text: piece.score for piece in model.pieces if piece.kind == _NORMAL}
    ways = [
        (-score, text[:cut], text[cut:])
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    ways.sort(key=lambda way: (way[0], -len(way[1]), -len(way[2])))
    return [(left, right) for _, left, right in ways]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yields numbers and values of a protocol buffer's fields: varints, or the bytes of anything else."""
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        wire_type = key & 7
        if wire_type == 0:
            value, offset = _varint(message, offset)
            yield key >> 3, value
            continue
        size = 8 if wire_type == 1 else 4
        if wire_type == 2:
            size, offset = _varint(message, offset)
        yield key >> 3, message[offset : offset + size]
        offset += size


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return value, offset
