"""SentencePiece models (`.model` files); the `sentencepiece` package defines the correct ids.

Source: NVIDIA/Megatron-LM `megatron/training/tokenizer/tokenizer.py`, the same three types:

* `SentencePieceTokenizer` adds `<CLS> <SEP> <EOD> <MASK>` after the model's pieces, and `<PAD> <BOS> <EOS>` if the
  model lacks them; `<EOD>` ends a document. Upstream converts these strings, and `<s>`, `</s>`, inside a text to the
  special ids; here they stay text.
* `GPTSentencePieceTokenizer` has only the model's pieces; its end of sequence (`</s>`) ends a document.
* `Llama2Tokenizer` is the same, but adds the beginning of sequence (`<s>`) before every text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from megatron import log
from megatron.errors import ConfigError, DataError
from megatron.tokenizers.behaviour import VOCABULARY, TokenizerParts
from megatron.tokenizers.encoders.fast_encoder import FastEncoder, agreeing_encoder, edge_cases
from megatron.tokenizers.library import Ids, Lengths, Tokenizer, TokenizerProperties, add_special_tokens
from megatron.tokenizers.sentencepiece_model import (
    SPACE,
    can_cut_before_spaces,
    is_special,
    needs_normalizing,
    read_model,
    tokenizer_json,
)
from megatron.tokenizers.tokenizer_files import canonical, file_advice, read_tokenizer_bytes

_ADDED_TOKENS = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")
_OWN_SPACES = ("  a", "a  ", " \n a", f"{SPACE}a", f"a{SPACE}{SPACE}b {SPACE}", "\t\ta  b   c    d", "\u3000a\u00a0b")


def sentencepiece_tokenizer(kind: str, model_file: str | None, known_library: str | None) -> Tokenizer:
    """Loads a SentencePiece model.

    Raises:
        ConfigError: the file, the package, or a required token is missing.
        DataError: the file is not a SentencePiece model.
    """
    if not model_file:
        raise ConfigError(f"--tokenizer-type {kind} requires --tokenizer-model (a SentencePiece .model file).")
    content = read_tokenizer_bytes(model_file, "--tokenizer-model")
    processor = _processor(content, model_file)
    has_more_tokens = kind == "SentencePieceTokenizer"
    added_tokens = _added_tokens(processor) if has_more_tokens else []
    eod_id = _id_of("<EOD>", processor, added_tokens) if has_more_tokens else processor.eos_id()
    prefix = [processor.bos_id()] if kind == "Llama2Tokenizer" else []
    if prefix == [-1]:
        raise ConfigError(
            f"--tokenizer-type Llama2Tokenizer adds a beginning of sequence before every text, but {model_file} has "
            "none. Use GPTSentencePieceTokenizer."
        )
    name = f"{kind}:{model_file}"
    reference = SentencePieceReference(processor, prefix, added_tokens)
    unknown_id = processor.unk_id()
    facts = TokenizerProperties(
        name,
        eod_id=eod_id if eod_id is not None and eod_id >= 0 else None,
        vocab_size=len(processor) + len(added_tokens),
        identity=lambda: canonical({"type": kind, "model_sha256": hashlib.sha256(content).hexdigest()}),
        special_ids=lambda: _special_ids(processor, added_tokens),
        unknown_id=None if unknown_id < 0 else unknown_id,
    )
    return Tokenizer(
        facts,
        reference,
        _fast(name, processor, content, known_library),
        lambda: _parts(processor, hashlib.sha256(content).hexdigest(), prefix, added_tokens),
        (prefix, []),
    )


def _parts(processor: Any, model_sha256: str, prefix: Sequence[int], added_tokens: Sequence[str]) -> TokenizerParts:
    """Returns the parts, see `behaviour.parts_of`; the algorithm is one opaque part."""
    return {
        "algorithm": [f"sentencepiece {model_sha256}"],
        VOCABULARY: [*processor.id_to_piece(list(range(len(processor)))), *added_tokens],
        "ids around a text": [" ".join(map(str, prefix)), ""],
    }


def _special_ids(processor: Any, added_tokens: Sequence[str]) -> dict[str, int]:
    """Returns the control pieces, the bracketed user-defined pieces, and the added tokens."""
    try:
        pieces = read_model(processor.serialized_model_proto()).pieces
    except ValueError:
        pieces = ()
    ids = {piece.text: number for number, piece in enumerate(pieces) if is_special(piece)}
    return {**ids, **{token: len(processor) + index for index, token in enumerate(added_tokens)}}


class SentencePieceReference:
    """A `sentencepiece.SentencePieceProcessor` as the reference.

    Args:
        prefix: ids before every text.
        added_tokens: texts of the ids after the model's.
    """

    name = "sentencepiece"
    description = None  # a .model is no tokenizer.json

    def __init__(self, processor: Any, prefix: Sequence[int] = (), added_tokens: Sequence[str] = ()) -> None:
        self._processor = processor
        self._prefix = list(prefix)
        self._added_tokens = tuple(added_tokens)

    @cached_property
    def can_cut_before_spaces(self) -> bool:
        """True if texts may be cut before spaces, see `sentencepiece_model.can_cut_before_spaces`."""
        try:
            return can_cut_before_spaces(read_model(self._processor.serialized_model_proto()))
        except ValueError:
            return False

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Returns the concatenated ids of all texts, and the number of ids of each; runs in the calling thread."""
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        rows = self._processor.encode(list(texts), out_type="numpy", num_threads=1)
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        ids = np.concatenate(rows).astype(np.uint32, copy=False)
        return add_special_tokens(ids, lengths, self._prefix, []) if self._prefix else (ids, lengths)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, control pieces and added tokens included."""
        parts: list[str] = []
        run: list[int] = []
        for token in ids:
            written = self._control(token)
            if written is None:
                run.append(token)
                continue
            parts += [self._processor.decode(run), written] if run else [written]
            run = []
        return "".join([*parts, self._processor.decode(run)] if run else parts)

    def written(self, token: int) -> str | None:
        size = len(self._processor)
        return str(self._processor.id_to_piece(token)) if token < size else self._added_tokens[token - size]

    def _control(self, token: int) -> str | None:
        """Returns the text of an id that the model would not decode; None for the others."""
        size = len(self._processor)
        if token >= size:
            return self._added_tokens[token - size]
        return str(self._processor.id_to_piece(token)) if self._processor.is_control(token) else None


def _processor(content: bytes, model_file: str) -> Any:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as failure:
        raise ConfigError(
            f"--tokenizer-model {model_file} requires the sentencepiece package (pip install sentencepiece), or a "
            "tokenizer.json of the same model with --tokenizer-type HFTokenizer."
        ) from failure
    try:
        processor = SentencePieceProcessor(model_proto=content)
        size = len(processor)
        processor.id_to_piece(list(range(size)))  # each must be UTF-8
        processor.normalize(edge_cases([]))  # a damaged character table gives invalid text
    except (RuntimeError, ValueError, IndexError) as failure:
        size, reason = 0, str(failure).splitlines()[0][:200] if str(failure) else type(failure).__name__
    else:
        reason = "it holds no pieces"
    if not size:
        raise DataError(
            f"{model_file} (--tokenizer-model) is not a SentencePiece model: {reason}. {file_advice(content)}"
        )
    return processor


def _added_tokens(processor: Any) -> list[str]:
    """Returns the tokens that upstream adds after the model's pieces, in its order, except existing pieces."""
    ends = ((processor.pad_id(), "<PAD>"), (processor.bos_id(), "<BOS>"), (processor.eos_id(), "<EOS>"))
    tokens = [*_ADDED_TOKENS, *(token for number, token in ends if number < 0)]
    return [token for token in tokens if _id_of(token, processor, ()) is None]


def _id_of(token: str, processor: Any, added_tokens: Sequence[str]) -> int | None:
    if token in added_tokens:
        return len(processor) + added_tokens.index(token)
    number = int(processor.piece_to_id(token))  # the unknown id if there is no such piece
    return number if processor.id_to_piece(number) == token else None


class NormalizingEncoder:
    """A fast encoder behind the model's normalizer."""

    def __init__(self, processor: Any, encoder: FastEncoder) -> None:
        self._processor = processor
        self._encoder = encoder

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        return self._encoder.encode_flat(self._processor.normalize(list(texts)))


def _fast(
    name: str, processor: Any, content: bytes, known_library: str | None
) -> FastEncoder | NormalizingEncoder | None:
    """Returns the faster library, if it can read the model and gives the same ids; otherwise logs the reason."""
    if known_library == SentencePieceReference.name:
        return None
    description, normalizes, reason = _description(content)
    encoder = None
    if description is not None and known_library is not None:
        encoder = FastEncoder(description)
    elif description is not None:
        texts = [*edge_cases(()), *_OWN_SPACES]
        rows = processor.encode(texts, num_threads=1)
        if normalizes:
            texts = processor.normalize(texts)
        encoder, reason = agreeing_encoder(description, texts, dict(zip(texts, rows, strict=True)).__getitem__)
    if encoder is None:
        log.info(f"{name}: encoding with the sentencepiece library ({reason})")
        return None
    return NormalizingEncoder(processor, encoder) if normalizes else encoder


def _description(content: bytes) -> tuple[str | None, bool, str]:
    """Returns a tokenizer.json or None, True if texts must be normalized first, and the reason for None."""
    try:
        model = read_model(content)
    except ValueError as failure:
        return None, False, str(failure)
    description, reason = tokenizer_json(model)
    return description, needs_normalizing(model), reason
