"""The report names every operation, and what would be faster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.kernels.choice import Implementation, Kernels
from megatron.kernels.native import choosing, measured, report
from megatron.kernels.native.library import Library
from megatron.kernels.native.measured import Measurement
from megatron.kernels.native.report import kernel_report

MEASUREMENT = Measurement("a toaster", "2.13", "2026-01-01", "", {"norm": 1.52, "embedding": 0.9, "rotary": 2.0})


def test_notes_say_what_was_measured_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "MEASURED", {"cpu": MEASUREMENT})
    monkeypatch.setattr(report, "MEASURED", {"cpu": MEASUREMENT})
    monkeypatch.setattr(report, "library", lambda: None)
    torch_only = {choice.operation: choice for choice in kernel_report(Kernels())}
    assert "1.5 times as fast, is not built: python tools/build_kernels.py" in torch_only["norm"].note
    assert "csrc was not measured on cpu; --kernels softmax=csrc" in torch_only["softmax"].note
    compiled = {choice.operation: choice for choice in kernel_report(Kernels.all(Implementation.CSRC))}
    note = "measured 1.5 times as fast as torch on a toaster"
    assert (compiled["norm"].implementation, compiled["norm"].note) == ("csrc", note)
    assert compiled["softmax"].note == "not measured on cpu"


def test_a_gpu_uses_what_was_measured_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = Library(tmp_path, 1, torch.__version__, "x86_64", "", ("norm", "activation", "embedding"), (90,))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(report, "device_type", lambda: "cuda")
    for module in (report, choosing):
        monkeypatch.setattr(module, "library", lambda folder=None: built)
    monkeypatch.setattr(measured, "MEASURED", {"cuda": MEASUREMENT})
    monkeypatch.setattr(report, "MEASURED", {"cuda": MEASUREMENT})
    choices = {choice.operation: choice for choice in kernel_report()}
    assert (choices["norm"].implementation, choices["embedding"].implementation) == ("csrc", "torch")
    assert "measured 1.5 times as fast as torch on a toaster" in choices["norm"].note
    assert "csrc was not measured on cuda; --kernels activation=csrc uses it" in choices["activation"].note
    assert "csrc, measured 2.0 times as fast, is not in the library" in choices["rotary"].note
