"""The report names every operation, and what would be faster."""

from __future__ import annotations

import pytest

from megatron.config.sections.kernels import OPERATIONS
from megatron.kernels.choice import Implementation, Kernels
from megatron.kernels.native import report
from megatron.kernels.native.report import kernel_report


def test_report_names_every_operation_once() -> None:
    operations = [choice.operation for choice in kernel_report()]
    assert operations[-len(OPERATIONS) :] == list(OPERATIONS) and len(set(operations)) == len(operations)


def test_notes_say_what_was_measured_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SPEEDS", {("norm", "cpu"): {Implementation.CSRC: 1.52}})
    monkeypatch.setattr(report, "library", lambda: None)
    torch_only = {choice.operation: choice for choice in kernel_report(Kernels())}
    assert "1.5 times as fast, is not built: python tools/build_kernels.py" in torch_only["norm"].note
    assert "csrc was not measured on cpu; --kernels rotary=csrc" in torch_only["rotary"].note
    compiled = {choice.operation: choice for choice in kernel_report(Kernels.all(Implementation.CSRC))}
    assert (compiled["norm"].implementation, compiled["norm"].note) == ("csrc", "measured 1.5 times as fast as torch")
