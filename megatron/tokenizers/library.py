"""A tokenizer that wraps a library, with a faster library for encoding where that gives the same ids."""

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
from megatron.tokenizers.encoders.fast_encoder import FastEncoder, added_ids, fast_encoder, without_panics
from megatron.tokenizers.encoders.long_text import can_cut_before_spaces
from megatron.tokenizers.tokenizer_files import sha256

_ANY_LETTER = "a"
_BROKEN = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
CLS, SEP, MASK, PAD = "cls", "sep", "mask", "pad"
# Special tokens of masked language models, by what vocabularies write them as. BERT's name their own; RoBERTa's begin
# and end a sample with the tokens that begin and end a text.
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
    """What defines the right ids: they include all that the tokenizer adds around a text."""

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
    """What encodes faster than a reference: it gives bare ids, without what the tokenizer adds around a text."""

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]: ...


@dataclass(frozen=True)
class TokenizerProperties:
    """What is known of a tokenizer besides how it encodes.

    Args:
        eod_id: ends a document; None where the tokenizer has no such token.
        vocab_size: one more than the largest id.
        identity: what the fingerprint is taken over; computed when the fingerprint is first asked for.
        special_ids: finds the special tokens: id by text.
        is_exact: whether decoding gives back every text byte for byte.
        unknown_id: the id for text outside the vocabulary; None where there is none.
        roles: special tokens whose roles in masked samples its files name; the others are known by what they are
            written as, see `role_ids`.
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
    """A reference library and, where possible, a faster one that does the encoding.

    Args:
        fast: gives the ids of the reference faster; None where nothing does.
        parts: gives what the tokenizer does, see `behaviour.parts_of`.
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
        """What decides its ids, entry by entry; built again at each call, since it is large."""
        return self._parts()

    @cached_property
    def behaviour(self) -> Mapping[str, str]:
        """What decides its ids, as it is stored, see `behaviour.summaries`."""
        return summaries(self._parts())

    @property
    def library(self) -> str:
        """Which library encodes: gigatoken, tokenizers or sentencepiece."""
        return "gigatoken" if self._fast is not None else self._reference.name

    @property
    def can_cut_before_spaces(self) -> bool:
        """Whether a text may be encoded in pieces that begin with a space, see `long_text.can_cut_before_spaces`."""
        return self._reference.can_cut_before_spaces

    @property
    def description(self) -> str | None:
        """The reference as the text of a `tokenizer.json`; None for a library that has another form."""
        return self._reference.description

    @property
    def eod_id(self) -> int:
        """The id that ends a document.

        Raises:
            ConfigError: the tokenizer has none.
        """
        if self._facts.eod_id is None:
            raise ConfigError(
                f"The tokenizer {self.name} names no end-of-document token. Give it an eos_token (in "
                "tokenizer_config.json, or when a SentencePiece model is trained), or leave out --append-eod."
            )
        return self._facts.eod_id

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """Tokens that control the model rather than being text, by what they are written as; end-of-document is one."""
        ids = {text: number for text, number in self._facts.special_ids().items() if number != self.unknown_id}
        if self._facts.eod_id is not None and self._facts.eod_id not in ids.values():
            ids[self.decode([self._facts.eod_id])] = self._facts.eod_id
        return ids

    @cached_property
    def roles(self) -> Mapping[str, int]:
        """The ids of the special tokens of masked samples, by role (`ROLES`), those that the tokenizer has."""
        return {**role_ids(self.special_ids), **self._facts.roles}

    def written(self, token: int) -> str | None:
        """A token as the vocabulary has it; None where there is no such id."""
        return self._reference.written(token)

    @property
    def ids_before(self) -> Sequence[int]:
        """Ids that are put before every text, such as a beginning of sequence."""
        return self.added[0]

    @property
    def ids_after(self) -> Sequence[int]:
        """Ids that are put after every text, such as an end of sequence."""
        return self.added[1]

    def encode_bare(self, text: str) -> list[int]:
        """Ids of a text that is part of another one: nothing is put before or after it."""
        ids, (before, after) = self.encode(text), self.added
        return ids[len(before) : len(ids) - len(after)]

    def encode(self, text: str) -> list[int]:
        """Ids of one text."""
        ids, _ = self.encode_flat([text])
        return [int(token) for token in ids]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, uint32; the arrays are views of one buffer."""
        ids, lengths = self.encode_flat(texts)
        return np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else []

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Ids of all texts back to back (uint32), and how many belong to each (int64)."""
        if self._fast is None:
            return self._reference.encode_flat(texts)
        ids, lengths = self._fast.encode_flat(texts)
        return surround(ids, lengths, *self.added) if any(self.added) else (ids, lengths)

    def encode_rest(self, text: str) -> Ids:
        """Ids of the rest of a text that was cut before a space, as in the whole text (see `can_cut_before_spaces`).

        A letter in front of it takes what is put before texts.
        """
        return self.encode_flat([f"{_ANY_LETTER}{text}"])[0][len(self.encode(_ANY_LETTER)) :]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special tokens are written out, broken UTF-8 becomes U+FFFD."""
        return self._reference.decode([int(token) for token in ids])

    def token_bytes(self, token: int) -> bytes | None:
        """The UTF-8 bytes of one token, which may be a part of a character; None if unknown."""
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
        """See `long_text.can_cut_before_spaces`."""
        return can_cut_before_spaces(self._tokenizer)

    @property
    def description(self) -> str:
        """The text of a `tokenizer.json`."""
        return str(self._tokenizer.to_str())

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Ids of all texts back to back, and how many belong to each.

        Raises:
            DataError: the library gives a text up, as it does where a pattern takes too many attempts.
        """
        try:
            rows = without_panics(lambda: [self._tokenizer.encode(text).ids for text in texts])
        except ValueError as failure:
            raise DataError(
                f"the tokenizer gives a text up: {failure}. Check the patterns in tokenizer.json."
            ) from failure
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
        return np.fromiter((token for row in rows for token in row), dtype=np.uint32, count=int(lengths.sum())), lengths

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens written out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def written(self, token: int) -> str | None:
        """A token as the vocabulary has it."""
        text: str | None = self._tokenizer.id_to_token(token)
        return text


def rust_tokenizer(
    facts: TokenizerProperties, tokenizer: Any, known_library: str | None, reference: ReferenceLibrary | None = None
) -> Tokenizer:
    """A tokenizer whose reference is a `tokenizers.Tokenizer`; says in one line if no faster library can encode.

    Args:
        known_library: see `build_tokenizer`.
        reference: gives the ids of `tokenizer` in a better way than asking it for each text.
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
    """The bytes of a token that is written in its vocabulary as `<0xE2>` or in GPT-2's printable stand-ins for bytes.

    Source: GPT-2 `encoder.py` `bytes_to_unicode`: bytes that Latin-1 prints are written as themselves, the others, in
    their order, as the letters from U+0100 on.
    """
    matched = _BYTE_TOKEN.fullmatch(written)
    if matched is not None:
        return bytes([int(matched.group(1), 16)])
    hidden = [byte for byte in range(256) if not (0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xFF) or byte == 0xAD]
    stand_ins = {chr(0x100 + place): byte for place, byte in enumerate(hidden)}
    numbers = [stand_ins.get(letter, ord(letter)) for letter in written]
    return bytes(numbers) if written and max(numbers) < 0x100 else None


def role_ids(special_ids: Mapping[str, int]) -> dict[str, int]:
    """The id of each role that one of the special tokens is known for."""
    ids = {}
    for role, texts in _WRITTEN.items():
        known = [special_ids[text] for text in texts if text in special_ids]
        if known:
            ids[role] = known[0]
    return ids


def called_special(tokenizer: Any) -> dict[str, int]:
    """The added tokens of a `tokenizers.Tokenizer` that are marked as special."""
    added = tokenizer.get_added_tokens_decoder()
    return {str(token.content): int(number) for number, token in added.items() if token.special}


def surround(
    ids: npt.NDArray[Any],
    lengths: Lengths,
    prefix: Sequence[int],
    suffix: Sequence[int],
    dtype: npt.DTypeLike | None = None,
) -> tuple[npt.NDArray[Any], Lengths]:
    """Puts the same ids before and after every row of a flat batch.

    Shapes:
        ids [total], lengths [rows] -> ids [total + rows * (prefix + suffix)], lengths [rows].

    Args:
        dtype: of the result, as `ids` if left out; converting here saves a copy.
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
        for place in range(len(prefix)):
            is_text[starts + place] = False
        for place in range(len(suffix)):
            is_text[ends - 1 - place] = False
        result[is_text] = ids
    for place, token in enumerate(prefix):
        result[starts + place] = token
    for place, token in enumerate(reversed(suffix)):
        result[ends - 1 - place] = token
    return result, longer


def _checked_fast_encoder(tokenizer: Any, name: str, known_library: str | None) -> FastEncoder | None:
    if known_library is not None:
        return FastEncoder(tokenizer.to_str()) if known_library == "gigatoken" else None
    encoder, reason = fast_encoder(tokenizer)
    if encoder is None:
        log.info(f"{name}: encoding with the tokenizers library ({reason})")
    return encoder
