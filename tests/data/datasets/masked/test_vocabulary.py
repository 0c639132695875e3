"""What masking asks of tokenizers: all roles for sentence pairs, a mask token for the rest, and what begins a word."""

import json

import numpy as np
import pytest

from megatron.data.datasets.masked.vocabulary import MaskedVocabulary
from megatron.errors import ConfigError, DataError
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.data.datasets.masked.corpora import CLS, MASK, PAD, SEP, UNK, VOCABULARY, continues


def bpe(folder, tokens, merges=()):
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    return build_tokenizer(TokenizerChoice("GPT2BPETokenizer", *files))


def test_wordpiece(vocabulary):
    assert (vocabulary.cls_id, vocabulary.sep_id, vocabulary.mask_id, vocabulary.pad_id) == (CLS, SEP, MASK, PAD)
    assert vocabulary.size == VOCABULARY and vocabulary.eod_id == VOCABULARY - 1
    assert np.flatnonzero(vocabulary.is_special).tolist() == [PAD, CLS, SEP, MASK, VOCABULARY - 2, VOCABULARY - 1]
    assert not {UNK, *np.flatnonzero(vocabulary.is_special).tolist()} & set(vocabulary.drawable.tolist())
    assert len(vocabulary.drawable) == VOCABULARY - 7
    assert vocabulary.continues.tolist() == [continues(token) for token in range(VOCABULARY)]


def test_byte_level_bpe(tmp_path):
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b", "Ġ", "Ċ", "Ġa"]
    vocabulary = MaskedVocabulary.of(bpe(tmp_path, tokens, ["Ġ a"]), needs_all=True)
    assert (vocabulary.cls_id, vocabulary.sep_id, vocabulary.mask_id, vocabulary.pad_id) == (0, 2, 4, 1)
    assert np.flatnonzero(vocabulary.continues).tolist() == [5, 6]
    assert vocabulary.drawable.tolist() == [5, 6, 7, 8, 9]


def test_a_vocabulary_without_a_mask_token(tmp_path):
    tokenizer = bpe(tmp_path, ["a", "<|endoftext|>"])
    with pytest.raises(ConfigError, match=r"no mask token \(\[MASK\] or <mask>\).*--model-type wordpiece"):
        MaskedVocabulary.of(tokenizer, needs_all=False)


def test_ids_of_another_vocabulary(vocabulary):
    vocabulary.check_ids(np.array([0, VOCABULARY - 1]), str)
    vocabulary.check_ids(np.array([], np.int64), str)
    for bad in (VOCABULARY, -1):
        with pytest.raises(DataError, match=f"place 1 has id {bad}, but the vocabulary has {VOCABULARY} entries"):
            vocabulary.check_ids(np.array([5, bad]), lambda place: f"place {place}")
