"""Scenario 001.8: samples without prompts and from a file; every layout gives the greedy text of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from tests.inference.checkpoints import make_checkpoint
from tools import generate_samples_gpt

PROMPTS = "def main(argument):\n\nimport os\nthe last line without an end"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and a file of prompts of different lengths."""
    folder = tmp_path_factory.mktemp("scenario")
    make_checkpoint(folder)
    (folder / "prompts.txt").write_text(PROMPTS)
    return folder


def program(rank: int, argv: list[str]) -> int:
    return generate_samples_gpt.main(argv)


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_without_prompts(folder: Path) -> None:
    argv = ["--load", str(folder / "checkpoints"), "--num-samples", "2", "--genfile", str(folder / "samples.json")]
    assert generate_samples_gpt.main(argv) == 0
    found = records(folder / "samples.json")
    assert len(found) == 2 and found[0]["tokens"] != found[1]["tokens"]
    assert all(set(record) == {"prompt", "text", "tokens", "length", "finished"} for record in found)


def test_two_shards_of_two_stages_give_the_greedy_text_of_one_process(folder: Path) -> None:
    argv = ["--load", str(folder / "checkpoints"), "--sample-input-file", str(folder / "prompts.txt"), "--greedy"]
    assert generate_samples_gpt.main(argv) == 0
    expected = records(folder / "prompts.txt.out")
    assert [record["prompt"] for record in expected] == PROMPTS.split("\n")
    assert len({tuple(record["tokens"]) for record in expected}) == 4
    split = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    output = ["--sample-output-file", str(folder / "split")]
    assert run_ranks(program, 4, [*argv, *split, *output]) == [0] * 4
    assert records(folder / "split") == expected
