"""Tokenizers: equal to the reference library on hard text, and clear about what is wrong with their files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.tokenizers.references import write_folder

# --- Hugging Face ---------------------------------------------------------------------------------


def test_local_tokenizers_need_no_transformers_and_no_torch(tmp_path: Path) -> None:
    write_folder(tmp_path)
    program = (
        "import sys\nfor name in ('transformers', 'torch', 'huggingface_hub'): sys.modules[name] = None\n"
        "from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer\n"
        "print(build_tokenizer(TokenizerChoice('PretrainedFromHF', "
        f"tokenizer_name_or_path={str(tmp_path)!r})).encode('a b'))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[")


# --- errors ---------------------------------------------------------------------------------------


def test_missing_flags_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs --vocab-file .*\n.*needs --merge-file"):
        build_tokenizer(TokenizerChoice("GPT2BPETokenizer"))
    with pytest.raises(ConfigError, match="--vocab-file /nowhere/v.json is not a file"):
        build_tokenizer(TokenizerChoice("GPT2BPETokenizer", "/nowhere/v.json", "/nowhere/m.txt"))
    with pytest.raises(ConfigError, match="--tokenizer-type Parrot is unknown"):
        build_tokenizer(TokenizerChoice("Parrot"))
    with pytest.raises(ConfigError, match="PretrainedFromHF needs --tokenizer-name-or-path"):
        build_tokenizer(TokenizerChoice("PretrainedFromHF"))
    with pytest.raises(ConfigError, match="./none is neither a file nor a folder"):
        build_tokenizer(TokenizerChoice("HFTokenizer", tokenizer_name_or_path="./none"))
