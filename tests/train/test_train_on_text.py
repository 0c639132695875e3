"""The command line of train_on_text.py and what it means to the trainer."""

from __future__ import annotations

import pytest

from megatron.config import RunRequest, parse
from megatron.config.program_flags import read_program
from megatron.errors import ConfigError
from train_on_text import OwnTextFlags


def read(*words: str) -> tuple[OwnTextFlags, RunRequest]:
    own, rest = read_program(OwnTextFlags, words, "train_on_text.py", "Trains.", positional="--text")
    return own, parse(["--model-preset", "laptop", *own.trainer_arguments(), *rest], program=own.program)


def test_a_text_alone_is_enough() -> None:
    own, request = read("books/my.first.txt")
    assert str(own.folder) == "books/my-training"
    assert request.data.data_path == ("books/my-training/train_text_document",)
    assert request.data.tokenizer_name_or_path == "books/my-training/tokenizer.json"
    assert (request.saving.save, request.loading.load) == ("books/my-training/checkpoints",) * 2
    assert (request.report.run_dir, request.data.split) == ("books/my-training/run", "95,5,0")
    assert request.optim.train_iters == 200, "of the preset"
    assert (
        str(read("texts/")[0].folder) == "texts-training" and str(read("../.hidden")[0].folder) == "../.hidden-training"
    )


def test_the_trainers_flags_win() -> None:
    own, request = read(
        "my.jsonl", "--output-folder", "out", "--tokenizer", "t.json", "--save", "mine", "--train-iters", "7"
    )
    assert request.data.data_path == ("out/train_text_document",)
    assert request.data.tokenizer_name_or_path == own.tokenizer == "t.json"
    assert (request.saving.save, request.loading.load) == ("mine", "out/checkpoints")
    assert request.optim.train_iters == 7


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("texts/*.txt",), r"--text texts/\*.txt is not one file or folder"),
        (("sqlite:///a.db?table=b",), "no output folder can be derived from it. Name one: --output-folder"),
        (
            ("a.txt", "--vocab-size", "900", "--tokenizer", "t.json"),
            "--vocab-size 900 has no effect with --tokenizer t.json",
        ),
        ((), "--text"),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(*words)
