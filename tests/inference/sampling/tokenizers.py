"""One small tokenizer of every kind whose decoding differs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tokenizers import Tokenizer as Reference
from tokenizers import decoders, models, normalizers

from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice, build_tokenizer
from tests.helpers.sentencepiece_models import load, write_model
from tests.helpers.vocabulary import write_vocabulary

KINDS = ("byte-level", "sentencepiece", "sentencepiece-added", "llama", "unigram", "wordpiece", "byte-fallback")


@cache
def tokenizer(kind: str) -> Tokenizer:
    """Builds the tokenizer once per process."""
    folder = Path(mkdtemp())
    if kind == "byte-level":
        return build_tokenizer(write_vocabulary(folder, 400))
    if kind == "sentencepiece":
        return load(write_model(folder))
    if kind == "sentencepiece-added":
        return load(
            write_model(folder, add_dummy_prefix=False, remove_extra_whitespaces=False), "SentencePieceTokenizer"
        )
    if kind == "llama":
        return load(write_model(folder), "Llama2Tokenizer")
    if kind == "unigram":
        return load(write_model(folder, model_type="unigram", byte_fallback=False, vocab_size=400))
    if kind == "wordpiece":
        words = ["[UNK]", "[SEP]", *"abcdef.,'!", *(f"##{letter}" for letter in "abcdef"), "bad", "##ed", "fée", "漢"]
        (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
        return build_tokenizer(TokenizerChoice("BertWordPieceCase", str(folder / "vocab.txt")))
    return _byte_fallback(folder)


def _byte_fallback(folder: Path) -> Tokenizer:
    """As Llama's tokenizer.json: unknown characters become bytes, and a run of bytes that is not UTF-8 is given up."""
    vocabulary = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    for piece in ("▁", *"abcdef.,", "é", "ab", "▁a", "▁ab"):
        vocabulary[piece] = len(vocabulary)
    merges = [("a", "b"), ("▁", "a"), ("▁a", "b")]
    reference = Reference(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    reference.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    reference.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    reference.save(str(folder / "tokenizer.json"))
    return build_tokenizer(TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(folder)))
