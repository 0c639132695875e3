"""Scenario 003.1: HelloDeepSpeed's train_bert.py makes an experiment folder and learns."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from statistics import mean

import pytest

from tests.seeds.hello_deepspeed.runs import Alone

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.xdist_group("HelloDeepSpeed")  # one worker, so that the runs happen once


def _git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False).stdout


def test_003_1_experiment_folder_and_a_falling_loss(hello_alone: Alone) -> None:
    folder = hello_alone.long
    assert re.fullmatch(r"bert_pretrain\.\d{4}(\.\d\d){5}\.[0-9a-f]{8}", folder.name)
    assert {"hparams.json", "githash.log", "gitdiff.log", "tb_dir", "checkpoints"} <= {p.name for p in folder.iterdir()}
    assert json.loads((folder / "hparams.json").read_text())["h_dim"] == 32
    assert list((folder / "tb_dir").glob("events.*"))
    losses = [float(text) for text in re.findall(r"^Loss: (\d+\.\d{4})$", hello_alone.output, flags=re.M)]
    assert len(losses) == 200
    assert mean(losses[-20:]) < mean(losses[:20]) - 1.0


def test_hash_and_diff_are_those_of_git(hello_alone: Alone) -> None:
    """The cases without git and without a commit are in tests/observe/test_run_directory.py."""
    commit = _git("rev-parse", "HEAD").decode()
    recorded = (hello_alone.long / "githash.log").read_text()
    if not _git("ls-files", "megatron/observe/run_directory.py"):
        assert recorded.startswith("not a git checkout")
        return
    assert recorded == commit
    changed = set(re.findall(rb"^diff --git a/(\S+)", (hello_alone.long / "gitdiff.log").read_bytes(), flags=re.M))
    assert changed == set(_git("diff", "--name-only", "HEAD", "--no-renames").split())
