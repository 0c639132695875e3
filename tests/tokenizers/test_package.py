"""The package `tokenizers` may be missing: one error says what to install, whoever needs it."""

import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.tokenizers.gpt2 import byte_level_bpe
from megatron.tokenizers.tokenizer_files import require_tokenizers
from megatron.tokenizers.wordpiece import wordpiece
from tools import train_tokenizer


def test_a_missing_package_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_tokenizers()
    text = tmp_path / "text.txt"
    text.write_text("def main(): pass\n" * 20)
    argv = ["--input", str(text), "--output-prefix", str(tmp_path / "new"), "--vocab-size", "300"]
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for model_type in ("bpe", "wordpiece", "unigram"):
        with pytest.raises(ConfigError, match="requires the tokenizers package: pip install tokenizers"):
            train_tokenizer.main([*argv, "--model-type", model_type])
    with pytest.raises(ConfigError, match="pip install tokenizers"):
        byte_level_bpe({"a": 0}, [])
    with pytest.raises(ConfigError, match="pip install tokenizers"):
        wordpiece({"[UNK]": 0}, True)
    assert not list(tmp_path.glob("new*"))
