"""SentencePiece model files as data: damaged ones, and those that only sentencepiece can read."""

from pathlib import Path
from typing import Any

import pytest

from megatron.tokenizers import sentencepiece as module
from megatron.tokenizers.sentencepiece_model import read_model
from tests.helpers.sentencepiece_models import load, write_model


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


def test_a_model_only_sentencepiece_can_read_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_model(tmp_path)
    with pytest.raises(ValueError, match="its file cannot be read here"):
        read_model(b"\x0a\xff")
    monkeypatch.setattr(module, "read_model", lambda content: read_model(b"\x0a\xff"))
    assert load(path).library == "sentencepiece" and not load(path).can_cut_before_spaces
    assert "its file cannot be read here" in capsys.readouterr().err
