"""The fast encoder: the same ids as the reference, or it is not used; its cache is bounded."""

import multiprocessing
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megatron.tokenizers.encoders import fast_encoder as fast_module
from megatron.tokenizers.encoders.fast_encoder import FastEncoder, resident_bytes
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.helpers.vocabulary import hard_documents, write_vocabulary
from tests.tokenizers.references import reference_of


def test_without_the_fast_library_the_ids_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = write_vocabulary(tmp_path)
    fast = build_tokenizer(choice)
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    slow = build_tokenizer(choice)
    assert (fast.library, slow.library) == ("gigatoken", "tokenizers")
    for left, right in zip(fast.encode_batch(hard_documents()), slow.encode_batch(hard_documents()), strict=True):
        assert left.tolist() == right.tolist() and left.dtype == right.dtype


def test_a_disagreeing_fast_library_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = FastEncoder.encode_flat

    def wrong(self: FastEncoder, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = honest(self, texts)
        return (ids ^ 1 if len(ids) else ids), lengths

    monkeypatch.setattr(FastEncoder, "encode_flat", wrong)
    tokenizer = build_tokenizer(write_vocabulary(tmp_path))
    assert tokenizer.library == "tokenizers"
    assert "gigatoken gives other ids" in capsys.readouterr().err


def test_the_cache_of_the_fast_library_is_bounded(tmp_path: Path) -> None:
    # In a process of its own: what other tests keep, or free late, is not the encoder's.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        grown_bytes = process.submit(growth_bytes, tmp_path).result(timeout=300)
    assert grown_bytes < 60 << 20  # 6 MB of distinct words would otherwise leave about 45 MB and keep growing


def growth_bytes(folder: Path) -> int:
    """By how much the process grows with twelve texts of distinct words."""
    encoder = FastEncoder(reference_of(write_vocabulary(folder)).to_str(), cache_bytes=8 << 20)
    texts = distinct_words(12)
    expected = encoder.encode_flat(["end of it"])[0].tolist()
    before = resident_bytes()
    for text in texts:
        encoder.encode_flat([text])
    after = resident_bytes()
    assert before is not None and after is not None
    assert encoder.encode_flat(["end of it"])[0].tolist() == expected
    return after - before


def test_where_memory_cannot_be_measured_the_cache_is_bounded_by_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = FastEncoder(reference_of(write_vocabulary(tmp_path)).to_str(), cache_bytes=8 << 20)
    expected = encoder.encode_flat(["end of it"])[0].tolist()
    monkeypatch.setattr(fast_module, "_MEMORY_FILE", str(tmp_path / "none"))
    assert resident_bytes() is None
    first = encoder._library
    encoder.encode_flat(distinct_words(3))
    assert encoder._library is not first
    assert encoder.encode_flat(["end of it"])[0].tolist() == expected


def distinct_words(texts: int) -> list[str]:
    """Texts of 50,000 words each, hardly one of which occurs twice."""
    drawn = random.Random(1)
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    return [" ".join("".join(drawn.choices(alphabet, k=9)) for _ in range(50_000)) for _ in range(texts)]


@pytest.mark.parametrize("count", [1, 20_000])
def test_many_short_texts_in_one_call_get_the_ids_of_one_call_each(tmp_path: Path, count: int) -> None:
    texts = [text[:50] for text in hard_documents(300)] * (count // 300) + ["one more"]
    tokenizer = build_tokenizer(write_vocabulary(tmp_path))
    encoder = tokenizer._fast
    assert isinstance(encoder, FastEncoder)
    ids, lengths = encoder.encode_flat(texts)
    other_ids, other_lengths = encoder._encode_each(texts)
    np.testing.assert_array_equal(ids, other_ids)
    np.testing.assert_array_equal(lengths, other_lengths)
    assert (ids.dtype, lengths.dtype) == (np.uint32, np.int64)
