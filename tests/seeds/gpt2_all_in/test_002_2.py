"""Scenario 002.2: a mistake in a configuration file ends the program at once, and the message says what is allowed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.gpt2_all_in import train
from examples.gpt2_all_in.flags import PROGRAM, AllInOneFlags, command_line
from megatron.config import parse
from megatron.errors import ConfigError, ExitCode

MISTAKES = {
    "unknown key": ({"model": {"n_layers": 4}}, 'the key "model.n_layers" is unknown. Did you mean "n_layer"?'),
    "wrong type": ({"model": {"n_ctx": 24.5}}, '"model.n_ctx" must be an integer, not 24.5'),
    "text for a switch": ({"trainer": {"bfloat16": "false"}}, "\"trainer.bfloat16\" must be true or false, not"),
    "heads": ({"model": {"n_head": 5, "d_model": 32}}, '"model.n_head" 5 does not divide "model.d_model" 32. Use one '),
    "dataset": ({"dataset": "foo"}, "\"dataset\" must be dev or full, not 'foo'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_002_2_mistakes_name_file_key_and_what_is_allowed(tmp_path: Path, mistake: str) -> None:
    changes, sentence = MISTAKES[mistake]
    path = write(tmp_path, changes)
    with pytest.raises(ConfigError) as caught:
        train.main(["--config", str(path)])
    assert caught.value.exit_code == ExitCode.USAGE
    assert str(caught.value).startswith(f"{path}: {sentence}")


def test_the_exit_code_is_not_zero(tmp_path: Path) -> None:
    program = Path(train.__file__)
    words = [sys.executable, str(program), "--config", str(write(tmp_path, {"dataset": "foo"}))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == ExitCode.USAGE and "must be dev or full" in done.stderr


def test_the_width_of_the_feed_forward_layers_follows_the_model(tmp_path: Path) -> None:
    path = write(tmp_path, {"model": {"d_model": 64, "n_head": 4}})
    assert parse(command_line(AllInOneFlags(config=str(path)), ()), program=PROGRAM).model.ffn_hidden_size == 256


def write(folder: Path, changes: dict[str, Any]) -> Path:
    path = folder / "mine.json"
    path.write_text(json.dumps({"dataset": "dev", **changes}))
    return path
