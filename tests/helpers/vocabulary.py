"""A small byte-level vocabulary and hard texts, made on the spot."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

from megatron.tokenizers.tokenizer import TokenizerChoice
from trident.corpus.vocabulary.learning import save_byte_level_vocabulary, train_byte_level

GPT2_FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def write_vocabulary(folder: Path, vocab_size: int = 600) -> TokenizerChoice:
    """Writes `demo-vocab.json` and `demo-merges.txt` into a folder."""
    vocabulary, merges = trained_vocabulary(vocab_size)
    vocab_file, merge_file = save_byte_level_vocabulary(
        str(folder / "demo"), vocabulary, [list(pair) for pair in merges]
    )
    return TokenizerChoice("GPT2BPETokenizer", str(vocab_file), str(merge_file))


def trained_vocabulary(vocab_size: int = 600) -> tuple[dict[str, int], tuple[tuple[str, ...], ...]]:
    """The tokens with their ids, and the merges."""
    vocabulary, merges = _trained(vocab_size)
    return dict(vocabulary), merges


def hard_documents(count: int = 300, seed: int = 7) -> list[str]:
    """Random texts over many scripts, spaces, control characters and special-token strings; some are empty."""
    drawn = random.Random(seed)
    pieces = [
        *"abcXYZ019 .,;!?\n\t\r\x00\x7f\x80\xa0",
        "\r\n", "  ", "'s", "'ll", "'S", "it's", " the", "\u2028", "\u3000", "e\u0301", "é", "ﬁ",
        "Straße", "漢字", "한국어", "Привет", "שלום", "مرحبا", "สวัสดี", "١٢٣",
        "½", "👩‍👩‍👧", "🇩🇪", "👍🏽", "\U000e0001", "\U0010ffff", "\ufeff", "\ufffd",
        "<|endoftext|>", "</s>", "<s>", "[CLS]", "=====", "aaaaaaaa", "        ", "\n\n\n\n",
    ]  # fmt: skip
    texts = ["".join(drawn.choice(pieces) for _ in range(drawn.randrange(0, 60))) for _ in range(count)]
    return [*texts, "", " ", "\n", "<|endoftext|>", "a" * 5000, " " * 5000, "ab " * 5000]


@cache
def _trained(vocab_size: int) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, ...], ...]]:
    source = Path(random.__file__).read_text(encoding="utf-8")
    vocabulary, merges = train_byte_level([source, *hard_documents(100, seed=1)], vocab_size)
    return tuple(vocabulary.items()), tuple(tuple(pair) for pair in merges)
