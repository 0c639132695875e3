"""tools/runs/plan.py: the table of all schedules, and one schedule drawn and written."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron.errors import ConfigError
from tools.runs import plan


def test_the_table_has_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 ranks, 8 micro-batches"
    found = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert found["1f1b"] == ["1", "27.3%", "4", "3", "2", "1"]
    assert found["v-half"] == ["2", "18.6%", "2.5", "2.5", "2.5", "2.5"]
    assert len(found) == 7


def test_only_schedules_with_the_chunks_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--virtual-pipeline-model-parallel-size", "3"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["interleaved", "interleaved-zb"]


def test_a_schedule_is_drawn_and_what_is_written_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, file = tmp_path / "zbv.svg", tmp_path / "zbv.csv"
    words = ["--pipeline-schedule", "zbv", "--pipeline-model-parallel-size", "2", "--micro-batches", "3"]
    assert plan.main([*words, "--draw", str(picture), "--csv", str(file)]) == 0
    first = capsys.readouterr().out.splitlines()
    assert first[-3:] == ["activations held, in micro-batches of a stage, by rank: 2 2", str(picture), str(file)]
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert plan.main(["--pipeline-schedule", str(file)]) == 0
    second = capsys.readouterr().out.splitlines()
    assert second[1:-1] == first[1:-3]
    with pytest.raises(ConfigError, match=r"zbv\.csv .* 3 micro-batches"):
        plan.main(["--pipeline-schedule", str(file), "--micro-batches", "5"])


def test_a_drawing_needs_a_schedule() -> None:
    with pytest.raises(ConfigError, match="--draw x.svg requires --pipeline-schedule"):
        plan.main(["--draw", "x.svg"])


@pytest.mark.parametrize(
    ("flags", "content", "dtype"),
    [
        ("--config", '{"fp16": true}', "--fp16"),
        ("--config", '{"lr": 0.001}', "--bf16"),
        ("--deepspeed_config", '{"fp16": {"enabled": true}}', "--fp16"),
    ],
)
def test_a_dtype_from_a_file_is_kept(
    flags: str, content: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "given.json"
    path.write_text(content)
    words = ["--num-layers", "2", "--hidden-size", "256", "--num-attention-heads", "4", "--seq-length", "128"]
    words += ["--max-position-embeddings", "128", "--devices", "1", flags, str(path)]
    assert plan.main(words) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert ("--bf16" in command) == (dtype == "--bf16")
