"""The commands of docs/seeds/gpt2_all_in.md, run in order with a smaller cpu.json."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from examples.gpt2_all_in.benchmark import new_log
from tests.helpers.commands.guides import blocks, run_commands
from tests.helpers.projects.all_in_one import MODEL


@pytest.mark.slow
@pytest.mark.full
def test_every_command_of_the_guide_works(tmp_path: Path) -> None:
    small = {
        "dataset": "dev",
        "model": {**MODEL, "n_ctx": 24},
        "trainer": {"batch_size": 512, "lr": 1e-2, "log_interval": 5, "ckpt_interval": 10},
    }
    (tmp_path / "cpu.json").write_text(json.dumps(small))
    output = "".join(run_commands(tmp_path, "\n".join(blocks("seeds/gpt2_all_in.md")), examples=True))
    assert re.search(r"(?m)^Step: 5 \| Loss: \d\.\d{3}$", output)
    assert re.search(r"train: shards/train-\* \[0, \d+\): .* 1.00 epochs", output)
    assert len(list((tmp_path / "logs" / "benchmark").glob("*.log"))) == 2
    assert len(list((tmp_path / "logs").glob("SFT/*/hf/iter_*/model.safetensors"))) == 1
    assert "resumed archive/" in output and "epoch 2/2 is complete" in output
    assert len((tmp_path / "texts.jsonl").read_text().splitlines()) == 2


def test_logs_that_begin_within_one_second_have_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20261122-182254")
    found = [new_log(tmp_path / "logs").name for _ in range(3)]
    assert found == ["20261122-182254.log", "20261122-182254-2.log", "20261122-182254-3.log"]
