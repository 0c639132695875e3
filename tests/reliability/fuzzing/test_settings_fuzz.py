"""Damaged and hostile files of settings are refused by a `ConfigError`, or give a run that can be recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_damaged_and_hostile_settings(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """A twentieth of `--cases`; others with `--fuzz-seed`. A failure says how to play its case again."""
    cases, seed = max(100, pytestconfig.getoption("--cases") // 20), pytestconfig.getoption("--fuzz-seed")
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "tests.reliability.fuzzing.fuzz_settings",
        "--cases",
        str(cases),
        "--seed",
        str(seed),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, "--report", str(report)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-8000:]
    found = json.loads(report.read_text())
    assert found["failures"] == []
    *_, total = (row.split() for row in found["table"][1:])
    accepted, refused = int(total[2]), int(total[3])
    assert accepted + refused == cases and accepted > cases // 30 and refused > cases // 10
