"""Whole runs with pipeline schedules: samples of growing length, evaluation and texts, and checkpoints that any other
schedule goes on from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import find
from megatron.parallel.schedule.building import idle_share
from megatron.train.start_up.summary import chunk_costs
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, saved_config, steps, train_here, write_tiny_corpus

STAGES, STEPS, LAST_CUT, MICRO_BATCHES = 2, 4, 2, 2
FACTS = ("lm_loss", "gradient_norm")
# Each rank: its two chunks on two micro-batches, the second without a division of the backward pass.
V_FILE = "0F0,3F0,3I0,0I0,3W0,0W0,0F1,3F1,3B1,0B1\n1F0,2F0,2I0,1I0,2W0,1W0,1F1,2F1,2B1,1B1\n"


def train_all(rank: int, commands: Sequence[list[str]]) -> list[tuple[int, str]]:
    """Runs one command after the other in the same processes."""
    return [train_here(rank, command) for command in commands]


def command(corpus: TinyCorpus, folder: Path, *more: str, **changes: Any) -> list[str]:
    """A run of six blocks, which chunks divide unevenly, whose samples grow from half their length on."""
    flags: dict[str, Any] = {"num_layers": 6, "hidden_size": 16, "train_iters": STEPS, "save_interval": LAST_CUT}
    flags |= {"curriculum_min_length": 16, "curriculum_steps": STEPS - 1, "eval_interval": LAST_CUT, "eval_iters": 1}
    flags |= {"sample_prompts": corpus.folder / "prompts.txt", "sample_tokens": 4, "hidden_dropout": 0.1}
    return corpus.flags("--curriculum-learning", *more, folder=folder, **(flags | changes))


def records(folder: Path, name: str, *fields: str) -> list[list[Any]]:
    """Fields of the lines of a file of the run that have them all."""
    lines = map(json.loads, (folder / "run" / name).read_text().splitlines())
    return [[line[field] for field in fields] for line in lines if set(fields) <= line.keys()]


@pytest.mark.full
def test_any_schedule_goes_on_from_any_other(tmp_path: Path) -> None:
    corpus = write_tiny_corpus(tmp_path)
    (tmp_path / "prompts.txt").write_text("one and\nand so\n")
    (tmp_path / "v.csv").write_text(V_FILE)
    whole, mixed, bits, cut = (tmp_path / name for name in ("whole", "mixed", "bits", "cut"))
    ((code, text),) = run_ranks(train_all, 1, [command(corpus, whole)])[0]
    assert (code, text) == (0, "")
    stages = {"pipeline_model_parallel_size": STAGES}
    zbv = {**stages, "pipeline_schedule": "zbv", "zero_stage": 2}
    v_file = {"pipeline_schedule": tmp_path / "v.csv", "virtual_pipeline_model_parallel_size": 2}
    commands = [
        command(corpus, mixed, **stages, virtual_pipeline_model_parallel_size=3, exit_interval=LAST_CUT),
        command(corpus, mixed, **stages, **v_file, zero_stage=2),
        command(corpus, bits, **zbv),
        command(corpus, cut, **zbv, exit_interval=LAST_CUT),
        command(corpus, cut, **zbv),
    ]
    for results in run_ranks(train_all, STAGES, commands, timeout_seconds=240):
        assert results == [(0, "")] * len(commands)
    expected = steps(whole, *FACTS)
    assert sorted(expected) == list(range(1, STEPS + 1))
    for folder in (mixed, bits, cut):
        found = steps(folder, *FACTS)
        for step, facts in expected.items():
            assert found[step] == pytest.approx(facts, rel=1e-5), (folder.name, step)
    assert steps(cut, *FACTS) == steps(bits, *FACTS)
    weights = [sorted(find(folder / "checkpoints")[0].path.glob("*.safetensors")) for folder in (bits, cut)]
    assert weights[0] and [file.read_bytes() for file in weights[0]] == [file.read_bytes() for file in weights[1]]
    (ratio,) = set(steps(bits, "bubble_ratio").values())
    assert ratio == (idle_share("zbv", STAGES, 2, MICRO_BATCHES, chunk_costs(saved_config(bits))),)
    for folder in (mixed, bits):
        evaluated, expected_losses = (records(each, "metrics.jsonl", "group", "lm_loss") for each in (folder, whole))
        assert [split for split, _ in evaluated] == [split for split, _ in expected_losses] and len(evaluated) > 2
        assert [loss for _, loss in evaluated] == pytest.approx([loss for _, loss in expected_losses], rel=1e-5)
        written = records(folder, "samples.jsonl", "iteration", "samples")
        assert written == records(whole, "samples.jsonl", "iteration", "samples") and len(written) > 1
