"""The table of measurements decides between what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.config.sections.computation import OPERATIONS
from megatron.kernels.choice import Implementation
from megatron.kernels.native import measured
from megatron.kernels.native.measured import MEASURED, Measurement, fastest

BOTH = frozenset({Implementation.TORCH, Implementation.CSRC})


def test_the_faster_one_is_taken_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"cpu": Measurement("a CPU", "2.13", "2026-01-01", "", {"norm": 1.5, "rotary": 0.9})}
    monkeypatch.setattr(measured, "MEASURED", table)
    assert fastest("norm", "cpu", BOTH) is Implementation.CSRC
    assert fastest("norm", "cpu", frozenset({Implementation.TORCH})) is Implementation.TORCH
    assert fastest("norm", "cuda", BOTH) is Implementation.TORCH  # not measured there
    assert fastest("softmax", "cpu", BOTH) is Implementation.TORCH  # nor this one here
    assert fastest("rotary", "cpu", BOTH) is Implementation.TORCH


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_table_names_operations_that_exist_and_its_source(device_type: str) -> None:
    measurement = MEASURED[device_type]
    assert set(measurement.speeds) <= set(OPERATIONS)
    assert all(speed > 0 for speed in measurement.speeds.values())
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", measurement.date) and measurement.torch and measurement.hardware
    program = measurement.command.split()[1] if "-m" not in measurement.command else "benchmarks/gpu/__main__.py"
    assert (Path(__file__).resolve().parents[3] / program).is_file()
