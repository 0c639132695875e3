"""What is found out before anything starts."""

from __future__ import annotations

import pytest

from megatron.errors import ConfigError
from megatron.launch.checks import check_program
from tests.config.command_lines import words

FLAGS = words()


def test_the_layout_is_told() -> None:
    flags = [*FLAGS, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    assert check_program(["somewhere/pretrain_gpt.py", *flags], 8) == ["8 ranks: 2 tensor x 2 pipeline x 2 data"]
    chosen, told = check_program(["pretrain_gpt.py", *flags, "--elastic"], 2)
    assert "using 2 x 1 x 1 data" in chosen and told == "2 ranks: 2 tensor x 1 pipeline x 1 data"


def test_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"needs a multiple of 4 processes, and 6 were started"):
        check_program(["pretrain_gpt.py", *FLAGS, "--tensor-model-parallel-size", "4"], 6)
    with pytest.raises(ConfigError, match=r"8 is not a multiple of --micro-batch-size 2 x 3 data-parallel"):
        check_program(["pretrain_gpt.py", *FLAGS], 3)
    with pytest.raises(ConfigError) as caught:
        check_program(["pretrain_gpt.py", *FLAGS, "--no-such-flag", "1", "--lr", "-1"], 2)
    assert len(caught.value.problems) == 2


def test_a_program_of_other_flags_is_not_checked() -> None:
    assert check_program(["mine.py", "--what"], 3) == [
        "mine.py is not checked before its start: its flags are not known here"
    ]
