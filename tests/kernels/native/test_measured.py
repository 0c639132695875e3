"""The table of measurements decides between what is there."""

from __future__ import annotations

import pytest

from megatron.config.sections.kernels import OPERATIONS
from megatron.kernels.choice import Implementation
from megatron.kernels.native import measured
from megatron.kernels.native.measured import SPEEDS, fastest

BOTH = frozenset({Implementation.TORCH, Implementation.CSRC})


def test_the_faster_one_is_taken_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {("norm", "cpu"): {Implementation.CSRC: 1.5}, ("rotary", "cpu"): {Implementation.CSRC: 0.9}}
    monkeypatch.setattr(measured, "SPEEDS", table)
    assert fastest("norm", "cpu", BOTH) is Implementation.CSRC
    assert fastest("norm", "cpu", frozenset({Implementation.TORCH})) is Implementation.TORCH
    assert fastest("norm", "cuda", BOTH) is Implementation.TORCH  # not measured there
    assert fastest("rotary", "cpu", BOTH) is Implementation.TORCH


def test_the_table_names_operations_that_exist() -> None:
    assert {operation for operation, _ in SPEEDS} <= set(OPERATIONS)
    assert all(speed > 0 for speeds in SPEEDS.values() for speed in speeds.values())
