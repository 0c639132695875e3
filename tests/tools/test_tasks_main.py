"""tasks/main.py: upstream's flags and result lines; its figures are tested in tests/trident/evaluate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tasks import main as program
from tests.inference.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    make_checkpoint(folder)
    rows = [{"text": f"return the {word}"} for word in ("value", "list", "seed")]
    (folder / "lambada_test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_the_lines_of_lambada_with_the_trainers_flags(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = [
        *("--task", "LAMBADA", "--valid-data", str(folder / "lambada_test.jsonl"), "--strict-lambada"),
        *("--load", str(folder / "checkpoints"), "--num-layers", "2", "--hidden-size", "32"),
        *("--num-attention-heads", "4", "--seq-length", "32", "--micro-batch-size", "8", "--log-interval", "10"),
        *("--checkpoint-activations", "--no-load-optim", "--no-load-rng", "--tokenizer-type", "GPT2BPETokenizer"),
    ]
    assert program.main(argv) == 0
    rule, text, again = capfd.readouterr().out.splitlines()[-3:]
    expected = (
        " validation results on LAMBADA | number correct: 0.0000E+00 | total examples: 3.0000E+00 | "
        "avg accuracy: 0.0000E+00"
    )
    assert text == expected
    assert rule == again == "-" * (len(expected) + 1)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("RACE", "--task RACE is not supported: it trains a classifier .* multiple_choice task of tools/evaluate.py"),
        ("ICT-ZEROSHOT-NQ", "--task ICT-ZEROSHOT-NQ is not supported: it evaluates a retriever"),
        ("MSDP-PROMPT", "--task MSDP-PROMPT is not supported: .* exact_match task"),
        ("HELLASWAG", "--task HELLASWAG is unknown. Use WIKITEXT103 or LAMBADA"),
    ],
)
def test_other_tasks_are_refused_with_a_way_out(task: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        program.main(["--task", task, "--load", "nowhere", "--valid-data", "a"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], r"--valid-data expects one file, got 0 \(none\)"),
        (["--valid-data", "a", "b"], r"--valid-data expects one file, got 2 \(a b\)"),
        (["--valid-data", "a", "--overlapping-eval", "0"], "--overlapping-eval 0 is out of range"),
        (["--valid-data", "a", "--faiss-use-gpu"], "unknown flag --faiss-use-gpu"),
    ],
)
def test_a_wrong_command_line_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        program.main(["--task", "WIKITEXT103", "--load", "nowhere", *words])
