"""Small SentencePiece models, trained on the spot."""

from __future__ import annotations

import io
import random
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece

from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import hard_documents

TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


def write_model(folder: Path, name: str = "small.model", **options: Any) -> Path:
    """Trains a model with these options of `sentencepiece` (BPE with byte fallback, 700 pieces) and writes it."""
    path = folder / name
    path.write_bytes(_trained(tuple(sorted(options.items()))))
    return path


def load(path: Path, kind: str = "GPTSentencePieceTokenizer", known_library: str | None = None) -> Tokenizer:
    """Builds the tokenizer of a model file."""
    return build_tokenizer(TokenizerChoice(kind, tokenizer_name_or_path=str(path)), known_library)


@cache
def _trained(options: tuple[tuple[str, Any], ...]) -> bytes:
    written = io.BytesIO()
    lines = Path(random.__file__).read_text(encoding="utf-8").splitlines() + [
        line for text in hard_documents(100, seed=1) for line in text.replace("\0", "").split("\n")
    ]
    settings = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 700, **dict(options)}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for line in lines if line.strip()),
        model_writer=written,
        character_coverage=0.98,
        num_threads=1,
        minloglevel=2,
        **settings,
    )
    return written.getvalue()
