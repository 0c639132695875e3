"""A program's own flags and the trainer's on one command line."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megatron.config import flag, parse
from megatron.config.program_flags import ProgramFlags, arguments_of, parse_over, read_program
from megatron.errors import ConfigError
from tests.config.command_lines import words as small_words


@dataclass(frozen=True)
class Flags(ProgramFlags):
    """A program that calls the global batch its batch, and has a --seed of its own."""

    data: str = flag(help="what to train on")
    batch: int = flag(8, "samples per step", at_least=1)
    seed: int = flag(1, "of the order")

    def trainer_arguments(self) -> list[str]:
        return ["--data-path", self.data, "--global-batch-size", str(self.batch)]


def read(line: str) -> tuple[Flags, list[str]]:
    return read_program(Flags, line.split(), "program.py", "Trains.")


def test_the_trainers_flags_are_given_back_as_they_were_written() -> None:
    trainers = "--lr 1e-3 --no-masked-softmax-fusion --split 8,1,1 --bf16 --rampup-batch-size 2 2 8"
    own, words = read(f"{trainers} --data d --seed 5")
    assert own == Flags(data="d", seed=5)
    assert words == trainers.split()


def test_options_with_values_are_words() -> None:
    pairs = {"--lr": 1e-4, "--save": None, "--data-path": "corpus", "--wandb-project": "--mine"}
    assert arguments_of(pairs) == ["--lr", "0.0001", "--data-path", "corpus", "--wandb-project=--mine"]


def test_a_value_that_looks_like_a_flag_stays_with_its_flag() -> None:
    _, words = read("--data d --wandb-exp-name=-trial")
    assert words == ["--wandb-exp-name=-trial"]


def test_a_flag_of_the_trainer_wins_over_the_programs_words() -> None:
    own, words = read("--data d --batch 4 --micro-batch-size 1 --global-batch-size 6")
    request = parse([*small_words(drop="--data-path"), *own.trainer_arguments(), *words])
    assert (request.data.data_path, request.optim.global_batch_size) == (("d",), 6)


@pytest.mark.parametrize(
    ("line", "sentences"),
    [
        ("--batch 0 --lr high", ["--data is required", "--batch 0 is out of range", 'a number, got "high"']),
        ("--data d --batsh 3", ["unknown flag --batsh. Did you mean --batch?"]),
        ("--data d --lrr 3", ["unknown flag --lrr. Did you mean --lr?"]),
    ],
)
def test_all_problems_are_shown(line: str, sentences: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(line)
    assert len(caught.value.problems) == len(sentences)
    for sentence in sentences:
        assert sentence in str(caught.value)


def test_the_help_shows_both_kinds_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    text = capsys.readouterr().out
    assert "what to train on" in text
    assert "--tensor-model-parallel-size" in text


def test_a_tool_divides_only_matrices_and_layers() -> None:
    """Flags of training may be repeated; ranks that share sequences would count everything as often as they are."""
    line = "--data d --context-parallel-size 2 --ds-sequence-parallel-size 2 --tensor-model-parallel-size 3"
    layout = parse_over(Flags, line.split(), "tool.py").layout
    assert (layout.tensor_model_parallel_size, layout.sequence_size) == (3, 1)
