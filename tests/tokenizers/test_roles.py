"""The special tokens of masked samples, of every family of tokenizers."""

import json

import pytest

from megatron.errors import DataError
from megatron.tokenizers.hugging_face import hugging_face_tokenizer
from megatron.tokenizers.library import ROLES, role_ids
from megatron.tokenizers.wordpiece import wordpiece


def roles(tokenizer):
    return tuple(map(tokenizer.roles.get, ROLES))


def test_the_first_way_of_writing_wins():
    assert role_ids({"<s>": 7, "[CLS]": 2, "</s>": 3}) == {"cls": 2, "sep": 3}
    assert role_ids({"<|endoftext|>": 0}) == {}


def test_the_files_of_hugging_face_name_theirs(tmp_path):
    made = wordpiece({"[UNK]": 0, "[SEP]": 1, "[MASK]": 2, "hide": 3, "[CLS]": 4}, True)
    made.add_special_tokens(["[SEP]", "[MASK]", "[CLS]"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = hugging_face_tokenizer("PretrainedFromHF", str(tmp_path), "tokenizers")
    assert roles(tokenizer) == (4, 1, 2, None) and tokenizer.eod_id == 1
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"mask_token": {"content": "hide"}, "pad_token": "[SEP]"})
    )
    assert roles(hugging_face_tokenizer("PretrainedFromHF", str(tmp_path), "tokenizers")) == (4, 1, 3, 1)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[START]"}))
    with pytest.raises(DataError, match=r"names cls_token '\[START\]', which is not in the vocabulary"):
        hugging_face_tokenizer("PretrainedFromHF", str(tmp_path), "tokenizers")
