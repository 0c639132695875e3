"""What the files beside a tokenizer.json declare gives the ids of `transformers`, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import DataError
from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice, build_tokenizer
from tests.tokenizers.references import write_folder

CHATML = "<|im_start|>user\nHello<|im_end|>\n  <|im_start|>assistant <bos>"
CONFIG, ADDED, SPECIAL = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
START, STOP = "<|im_start|>", "<|im_end|>"


def loaded(folder: Path) -> Tokenizer:
    return build_tokenizer(TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(folder)))


def write_files(folder: Path, files: dict[str, Any]) -> Path:
    write_folder(folder)
    for name, content in files.items():
        if name == CONFIG:
            content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eot>", **content}
        (folder / name).write_text(json.dumps(content))
    described = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**described, "truncation": None}))
    return folder


@pytest.mark.parametrize(
    "files",
    [
        {CONFIG: {"added_tokens_decoder": {"900": {"content": STOP, "special": True}, "88": {"content": START}}}},
        {CONFIG: {"added_tokens_decoder": {"7": {"content": START, "lstrip": True}}, "bos_token": STOP}},
        {CONFIG: {"additional_special_tokens": [START, STOP]}},
        {CONFIG: {"extra_special_tokens": {"image_token": STOP}, "bos_token": START, "unk_token": "He"}},
        {CONFIG: {"extra_special_tokens": [START]}, ADDED: {STOP: 602, "user": 603}},
        {ADDED: {START: 602, STOP: 603}, SPECIAL: {"eos_token": "<eot>", "bos_token": {"content": STOP}}},
        {CONFIG: {"additional_special_tokens": [START, "Hello"], "split_special_tokens": True}},
        {CONFIG: {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}},
        {CONFIG: {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True}},
    ],
)  # fmt: skip
def test_ids_are_those_of_transformers(tmp_path: Path, files: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = loaded(write_files(tmp_path, files))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in (CHATML, "Hello" + CHATML):
        assert tokenizer.encode(text) == theirs(text)["input_ids"]
    assert tokenizer.vocab_size == len(theirs) and tokenizer.eod_id == theirs.eos_token_id


def test_a_declared_token_makes_another_tokenizer(tmp_path: Path) -> None:
    plain = loaded(write_files(tmp_path, {}))
    declared = loaded(write_files(tmp_path, {CONFIG: {"additional_special_tokens": [START]}}))
    assert declared.fingerprint != plain.fingerprint and START in declared.special_ids
    assert (
        plain.fingerprint
        == loaded(write_files(tmp_path, {CONFIG: {"additional_special_tokens": ["<bos>"]}})).fingerprint
    )


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({CONFIG: {"added_tokens_decoder": {"5": 3}}}, "tokenizer.json: a token declared next to it cannot"),
        ({CONFIG: {"added_tokens_decoder": {"five": {"content": "a"}}}}, "invalid literal for int.*'five'"),
        ({CONFIG: {"additional_special_tokens": [["a"]]}}, "a token declared next to it cannot be read"),
        ({ADDED: ["a"]}, "added_tokens.json holds no JSON object"),
    ],
)
def test_what_is_no_token_is_refused(tmp_path: Path, files: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        loaded(write_files(tmp_path, files))


def test_dropout_of_merges_is_switched_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = loaded(write_files(tmp_path, {})).encode(CHATML * 20)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    assert loaded(tmp_path).encode(CHATML * 20) == plain
    assert "BPE-dropout of 0.5 is disabled" in capsys.readouterr().err
    (tmp_path / CONFIG).write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}))
    loaded(tmp_path)
    assert capsys.readouterr().err.count("BPE-dropout") == 1
