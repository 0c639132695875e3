"""Texts of many megabytes: pieces give the ids of the whole, and only where that is certain."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Reference

from megatron.tokenizers.encoders import long_text
from megatron.tokenizers.encoders.long_text import LongText, can_cut_before_spaces, encode_long
from megatron.tokenizers.library import Tokenizer, TokenizerProperties, rust_tokenizer
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.helpers.vocabulary import write_vocabulary

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def _gpt2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build_tokenizer(write_vocabulary(tmp_path_factory.mktemp("vocabulary")))


TEXTS = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n\t' asté한😀\u3000\x85")), max_size=80
)


@settings(deadline=None)
@given(text=TEXTS, piece_bytes=st.integers(0, 9))
def test_pieces_are_the_text(text: str, piece_bytes: int) -> None:
    pieces = list(LongText(bytearray(text.encode())).chunks(piece_bytes))
    assert "".join(pieces) == text
    for before, after in pairwise(pieces):
        assert after[0] == " " and not before[-1:].isspace()


@settings(deadline=None)
@given(text=TEXTS)
def test_pieces_give_the_ids_of_the_whole(_gpt2: Tokenizer, text: str) -> None:
    assert _gpt2.can_cut_before_spaces
    for tokenizer in (_gpt2, _tokenizer(_llama(_gpt2))):
        whole, _ = tokenizer.encode_flat([text])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LongText.chunks, "__defaults__", (3,))
            ids = encode_long(tokenizer, LongText(bytearray(text.encode())), np.int32)
        assert ids.dtype == np.int32
        assert ids.tolist() == whole.tolist()


def _tokenizer(reference: Reference) -> Tokenizer:
    size = 1 + max(reference.get_vocab(with_added_tokens=True).values())
    return rust_tokenizer(TokenizerProperties("test", None, size, str), reference, "tokenizers")


def _llama(gpt2: Tokenizer) -> Reference:
    reference = Reference.from_str(gpt2._reference._tokenizer.to_str())
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    reference.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    assert can_cut_before_spaces(reference)
    return reference


@pytest.mark.parametrize(
    "change",
    [
        lambda reference: setattr(reference, "normalizer", normalizers.NFC()),
        lambda reference: setattr(reference, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda reference: setattr(reference, "pre_tokenizer", pre_tokenizers.Metaspace()),
        lambda reference: setattr(
            reference, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        ),
        lambda reference: reference.add_special_tokens(["two words"]),
        lambda reference: setattr(
            reference, "post_processor", processors.TemplateProcessing(single="a $A", special_tokens=[("a", 1)])
        ),
    ],
)
def test_other_tokenizers_get_the_text_in_one_piece(_gpt2: Tokenizer, change: object) -> None:
    reference = Reference.from_str(_gpt2._reference._tokenizer.to_str())
    change(reference)
    assert not can_cut_before_spaces(reference)
    tokenizer = _tokenizer(reference)
    text = "some words and some more words " * 3
    assert encode_long(tokenizer, LongText(bytearray(text.encode())), np.int32).tolist() == tokenizer.encode(text)


def test_a_model_without_pre_tokenization_is_not_split() -> None:
    assert not can_cut_before_spaces(Reference(models.BPE()))
    assert long_text._CHUNK_BYTES < 16 << 20
