"""The table of measurements decides between what is there."""

from __future__ import annotations

import pytest

from megatron.kernels.choice import Implementation
from megatron.kernels.native import measured
from megatron.kernels.native.measured import Measurement, fastest

BOTH = frozenset({Implementation.TORCH, Implementation.CSRC})


def test_the_faster_one_is_taken_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"cpu": Measurement("a CPU", "2.13", "2026-01-01", "", {"norm": 1.5, "rotary": 0.9})}
    monkeypatch.setattr(measured, "MEASURED", table)
    assert fastest("norm", "cpu", BOTH) is Implementation.CSRC
    assert fastest("norm", "cpu", frozenset({Implementation.TORCH})) is Implementation.TORCH
    assert fastest("norm", "cuda", BOTH) is Implementation.TORCH  # not measured there
    assert fastest("softmax", "cpu", BOTH) is Implementation.TORCH  # nor this one here
    assert fastest("rotary", "cpu", BOTH) is Implementation.TORCH
