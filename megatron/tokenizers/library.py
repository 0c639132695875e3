"""A tokenizer that wraps a library, with a faster library for encoding if that gives the same ids."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron import log
from megatron.errors import ConfigError, DataError
from megatron.tokenizers.behaviour import TokenizerParts, parts_of, summaries
from megatron.tokenizers.encoders.fast_encoder import FastEncoder, added_ids, catch_rust_panics, fast_encoder
from megatron.tokenizers.encoders.long_text import can_cut_before_spaces
from megatron.tokenizers.tokenizer_files import sha256

_ANY_LETTER = "a"
_BROKEN = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
CLS, SEP, MASK, PAD = "cls", "sep", "mask", "pad"
# Texts of special tokens of masked language models. BERT has dedicated tokens; RoBERTa starts and ends a sample with
# the tokens that start and end a text.
_WRITTEN: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        CLS: ("[CLS]", "<CLS>", "<cls>", "<s>"),
        SEP: ("[SEP]", "<SEP>", "<sep>", "</s>"),
        MASK: ("[MASK]", "<MASK>", "<mask>"),
        PAD: ("[PAD]", "<PAD>", "<pad>"),
    }
)
ROLES = tuple(_WRITTEN)

Ids = npt.NDArray[np.uint32]
Lengths = npt.NDArray[np.int64]


class ReferenceLibrary(Protocol):
    """The library that defines the correct ids, special tokens around a text included."""

    @property
    def name(self) -> str: ...
    @property
    def can_cut_before_spaces(self) -> bool: ...
    @property
    def description(self) -> str | None: ...
    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def written(self, token: int) -> str | None: ...


class Encoder(Protocol):
    """A faster encoder, which returns ids without the special tokens around a text."""

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]: ...


@dataclass(frozen=True)
class TokenizerProperties:
    """Properties of a tokenizer besides its encoding.

    Args:
        eod_id: the end-of-document token; None if it has none.
        vocab_size: largest id plus 1.
        identity: returns the text that the fingerprint hashes.
        special_ids: returns the special tokens: id by text.
        is_exact: decoding restores every text byte for byte.
        unknown_id: the id for text outside the vocabulary; None if it has none.
        roles: special tokens for masked samples declared in its files; others are recognized by their text, see
            `role_ids`.
    """

    name: str
    eod_id: int | None
    vocab_size: int
    identity: Callable[[], str]
    special_ids: Callable[[], Mapping[str, int]] = dict
    is_exact: bool = False
    unknown_id: int | None = None
    roles: Mapping[str, int] = field(default_factory=dict)


class Tokenizer:
    """A reference library and, if possible, a faster one for encoding.

    Args:
        fast: a faster encoder with the same ids, or None.
        parts: returns the tokenizer's behaviour, see `behaviour.parts_of`.
        added: ids that the reference adds before and after every text.
    """

    def __init__(
        self,
        facts: TokenizerProperties,
        reference: ReferenceLibrary,
        fast: Encoder | None,
        parts: Callable[[], TokenizerParts],
        added: tuple[list[int], list[int]] = ([], []),
    ) -> None:
        self.name = facts.name
        self.vocab_size = facts.vocab_size
        self.is_exact = facts.is_exact
        self.unknown_id = facts.unknown_id
        self._facts = facts
        self._parts = parts
        self._reference = reference
        self._fast = fast
        self.added = added

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the tokenizer's files in a normal form."""
        return sha256(self._facts.identity())

    @property
    def parts(self) -> TokenizerParts:
        """Everything that determines its ids, entry by entry; rebuilt at each call, since it is large."""
        return self._parts()

    @cached_property
    def behaviour(self) -> Mapping[str, str]:
        """Stored summary of everything that determines its ids, see `behaviour.summaries`."""
        return summaries(self._parts())

    @property
    def library(self) -> str:
        """The encoding library: gigatoken, tokenizers or sentencepiece."""
        return "gigatoken" if self._fast is not None else self._reference.name

    @property
    def can_cut_before_spaces(self) -> bool:
        """True if a text may be encoded in chunks that begin with a space, see `long_text.can_cut_before_spaces`."""
        return self._reference.can_cut_before_spaces

    @property
    def description(self) -> str | None:
        """The reference as the text of a `tokenizer.json`; None for libraries with another format."""
        return self._reference.description

    @property
    def eod_id(self) -> int:
        """The end-of-document id.

        Raises:
            ConfigError: the tokenizer has none.
        """
        if self._facts.eod_id is None:
            raise ConfigError(
                f"The tokenizer {self.name} has no end-of-document token. Give it an eos_token (in "
                "tokenizer_config.json, or when training a SentencePiece model), or remove --append-eod."
            )
        return self._facts.eod_id

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """Ids of special tokens, end-of-document included, by their text."""
        ids = {text: number for text, number in self._facts.special_ids().items() if number != self.unknown_id}
        if self._facts.eod_id is not None and self._facts.eod_id not in ids.values():
            ids[self.decode([self._facts.eod_id])] = self._facts.eod_id
        return ids

    @cached_property
    def roles(self) -> Mapping[str, int]:
        """The ids of the tokenizer's special tokens for masked samples, by role (`ROLES`)."""
        return {**role_ids(self.special_ids), **self._facts.roles}

    def written(self, token: int) -> str | None:
        """Returns a token as written in the vocabulary; None for an unknown id."""
        return self._reference.written(token)

    @property
    def ids_before(self) -> Sequence[int]:
        """Ids added before every text, such as a beginning of sequence."""
        return self.added[0]

    @property
    def ids_after(self) -> Sequence[int]:
        """Ids added after every text, such as an end of sequence."""
        return self.added[1]

    def encode_bare(self, text: str) -> list[int]:
        """Returns the ids of a text without special tokens around it."""
        ids, (before, after) = self.encode(text), self.added
        return ids[len(before) : len(ids) - len(after)]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of one text."""
        ids, _ = self.encode_flat([text])
        return [int(token) for token in ids]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the ids of each text, uint32; the arrays are views of one buffer."""
        ids, lengths = self.encode_flat(texts)
        return np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else []

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Returns the concatenated ids of all texts (uint32), and the number of ids of each (int64)."""
        if self._fast is None:
            return self._reference.encode_flat(texts)
        ids, lengths = self._fast.encode_flat(texts)
        return add_special_tokens(ids, lengths, *self.added) if any(self.added) else (ids, lengths)

    def encode_rest(self, text: str) -> Ids:
        """Returns the ids of a text's rest, cut before a space, as in the whole text (see `can_cut_before_spaces`)."""
        # The letter in front absorbs the ids that are added before texts.
        return self.encode_flat([f"{_ANY_LETTER}{text}"])[0][len(self.encode(_ANY_LETTER)) :]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, special tokens included; invalid UTF-8 becomes U+FFFD."""
        return self._reference.decode([int(token) for token in ids])

    def token_bytes(self, token: int) -> bytes | None:
        """Returns the UTF-8 bytes of one token, which may be part of a character; None if unknown."""
        text = self.decode([token])
        if _BROKEN not in text:
            return text.encode()
        content = _bytes_of(self._reference.written(token) or "")
        return content if content is not None and content.decode(errors="replace") == text else None


class RustReference:
    """A `tokenizers.Tokenizer` as the reference."""

    name = "tokenizers"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def can_cut_before_spaces(self) -> bool:
        return can_cut_before_spaces(self._tokenizer)

    @property
    def description(self) -> str:
        return str(self._tokenizer.to_str())

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Returns the concatenated ids of all texts, and the number of ids of each.

        Raises:
            DataError: the library fails on a text, as for a pattern with too much backtracking.
        """
        try:
            rows = catch_rust_panics(lambda: [self._tokenizer.encode(text).ids for text in texts])
        except ValueError as failure:
            raise DataError(
                f"the tokenizer fails on a text: {failure}. Check the patterns in tokenizer.json."
            ) from failure
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
        return np.fromiter((token for row in rows for token in row), dtype=np.uint32, count=int(lengths.sum())), lengths

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def written(self, token: int) -> str | None:
        text: str | None = self._tokenizer.id_to_token(token)
        return text


def rust_tokenizer(
    facts: TokenizerProperties, tokenizer: Any, known_library: str | None, reference: ReferenceLibrary | None = None
) -> Tokenizer:
    """Builds a tokenizer whose reference is a `tokenizers.Tokenizer`; logs if no faster library can encode.

    Args:
        known_library: see `build_tokenizer`.
        reference: a wrapper of `tokenizer` that encodes faster than one call per text.
    """
    fast = _checked_fast_encoder(tokenizer, facts.name, known_library)
    added = added_ids(tokenizer)
    return Tokenizer(
        facts,
        reference or RustReference(tokenizer),
        fast,
        lambda: parts_of(json.loads(tokenizer.to_str()), added),
        added,
    )


def _bytes_of(written: str) -> bytes | None:
    """Returns the bytes of a token written as `<0xE2>` or in GPT-2's printable stand-ins for bytes.

    Source: GPT-2 `encoder.py` `bytes_to_unicode`: printable Latin-1 bytes stand for themselves, the others, in order,
    are the letters from U+0100 on.
    """
    matched = _BYTE_TOKEN.fullmatch(written)
    if matched is not None:
        return bytes([int(matched.group(1), 16)])
    hidden = [byte for byte in range(256) if not (0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xFF) or byte == 0xAD]
    stand_ins = {chr(0x100 + index): byte for index, byte in enumerate(hidden)}
    numbers = [stand_ins.get(letter, ord(letter)) for letter in written]
    return bytes(numbers) if written and max(numbers) < 0x100 else None


def role_ids(special_ids: Mapping[str, int]) -> dict[str, int]:
    """Returns the id of each role that a special token is known for."""
    ids = {}
    for role, texts in _WRITTEN.items():
        known = [special_ids[text] for text in texts if text in special_ids]
        if known:
            ids[role] = known[0]
    return ids


def special_added_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the added tokens of a `tokenizers.Tokenizer` that are marked as special."""
    added = tokenizer.get_added_tokens_decoder()
    return {str(token.content): int(number) for number, token in added.items() if token.special}


def add_special_tokens(
    ids: npt.NDArray[Any],
    lengths: Lengths,
    prefix: Sequence[int],
    suffix: Sequence[int],
    dtype: npt.DTypeLike | None = None,
) -> tuple[npt.NDArray[Any], Lengths]:
    """Adds the same ids before and after every row of a flat batch.

    Shapes:
        ids [total], lengths [rows] -> ids [total + rows * (prefix + suffix)], lengths [rows].

    Args:
        dtype: of the result, by default as `ids`; converting here saves a copy.
    """
    extra = len(prefix) + len(suffix)
    longer = lengths + extra
    ends = np.cumsum(longer)
    starts = ends - longer
    result = np.empty(len(ids) + extra * len(lengths), dtype=ids.dtype if dtype is None else dtype)
    if len(ids) > 256 * len(lengths):  # long rows: one copy each is cheaper than a mask over every token
        first = 0
        for start, length in zip((starts + len(prefix)).tolist(), lengths.tolist(), strict=True):
            result[start : start + length] = ids[first : first + length]
            first += length
    else:
        is_text = np.ones(len(result), dtype=bool)
        for offset in range(len(prefix)):
            is_text[starts + offset] = False
        for offset in range(len(suffix)):
            is_text[ends - 1 - offset] = False
        result[is_text] = ids
    for offset, token in enumerate(prefix):
        result[starts + offset] = token
    for offset, token in enumerate(reversed(suffix)):
        result[ends - 1 - offset] = token
    return result, longer


def _checked_fast_encoder(tokenizer: Any, name: str, known_library: str | None) -> FastEncoder | None:
    if known_library is not None:
        return FastEncoder(tokenizer.to_str()) if known_library == "gigatoken" else None
    encoder, reason = fast_encoder(tokenizer)
    if encoder is None:
        log.info(f"{name}: encoding with the tokenizers library ({reason})")
    return encoder
