"""What a program names: styles of lines and files of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.config import Program, parse
from megatron.config.flags.program import RunFileNames
from megatron.errors import ConfigError
from tests.config.command_lines import words

MINE = Program(log_styles={"mine": lambda: None}, run_files={"mine": RunFileNames("commit.txt", "changes.txt")})


def test_a_program_adds_names() -> None:
    request = parse(words("--log-style mine --run-files mine"), program=MINE)
    assert (request.report.log_style, request.report.run_files) == ("mine", "mine")
    assert request.program is MINE
    assert parse(words("--log-style short"), program=MINE).report.log_style == "short"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--log-style mine is unknown. Use one of: megatron, short\.") as caught:
        parse(words("--log-style mine --run-files mine"))
    assert "--run-files mine is unknown. Use one of: megatron." in str(caught.value)
    with pytest.raises(ConfigError, match=r"--log-style yours is unknown. Use one of: megatron, short, mine\."):
        parse(words("--log-style yours"), program=MINE)


def test_the_file_of_another_programs_run_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"log-style": "mine", "run-files": "mine"}))
    request = parse(words(f"--config {path}"))
    assert (request.report.log_style, request.report.run_files) == ("megatron", "megatron")
    assert not request.was_given("report.log_style")
    assert "--log-style mine belongs to another program; --log-style megatron is used." in request.notices
    assert parse(words(f"--config {path}"), program=MINE).report.log_style == "mine"
