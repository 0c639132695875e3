"""SentencePiece model files as data: damaged ones, and those that only sentencepiece can read."""

import random
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError, DataError
from megatron.tokenizers import sentencepiece as module
from megatron.tokenizers.sentencepiece_model import read_model
from tests.helpers.sentencepiece_models import TYPES, load, write_model


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram", "vocab_size": 500},
        {"user_defined_symbols": "of the"},
        {"treat_whitespace_as_suffix": True},
        {"split_by_whitespace": False},
        {"remove_extra_whitespaces": False},
    ],
)
def test_other_models_are_not_split(tmp_path: Path, options: dict[str, Any]) -> None:
    assert not load(write_model(tmp_path, **options)).can_cut_before_spaces


def test_damaged_models_are_refused_or_work(tmp_path: Path) -> None:
    good, drawn = write_model(tmp_path).read_bytes(), random.Random(3)
    path = tmp_path / "damaged.model"
    refused = 0
    for _ in range(50):
        content = bytearray(good)
        if drawn.random() < 0.3:
            del content[drawn.randrange(len(content)) :]
        for _ in range(drawn.choice((0, 1, 3))):
            content[drawn.randrange(len(content))] = drawn.randrange(256)
        path.write_bytes(content)
        try:
            tokenizer = load(path, drawn.choice(TYPES))
            ids = tokenizer.encode("a  wörld 한국 \u2581")
        except (ConfigError, DataError):
            refused += 1
            continue
        assert all(0 <= token < tokenizer.vocab_size for token in ids) and isinstance(tokenizer.decode(ids), str)
    assert 10 < refused < 50


def test_a_model_only_sentencepiece_can_read_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_model(tmp_path)
    with pytest.raises(ValueError, match="its file cannot be read here"):
        read_model(b"\x0a\xff")
    monkeypatch.setattr(module, "read_model", lambda content: read_model(b"\x0a\xff"))
    assert load(path).library == "sentencepiece" and not load(path).can_cut_before_spaces
    assert "its file cannot be read here" in capsys.readouterr().err
