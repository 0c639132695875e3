"""What is certain about CUDA before torch is imported, and agrees with what torch says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron import cuda_driver
from megatron.cuda_driver import cuda_unavailable_reason, is_cpu_build


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_it_never_contradicts_torch() -> None:
    assert not (cuda_unavailable_reason() and torch.cuda.is_available())
    assert is_cpu_build(Path(torch.version.__file__).read_text()) is (torch.version.cuda is torch.version.hip is None)


def test_the_variables_decide_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_torch_version_file", lambda: "cuda: Optional[str] = '12.8'\nhip = None\n")
    monkeypatch.setattr(cuda_driver.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    assert cuda_unavailable_reason() == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert cuda_unavailable_reason() == ""
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert cuda_unavailable_reason() == f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert cuda_unavailable_reason() == "DS_ACCELERATOR=cpu"


@pytest.mark.parametrize(
    ("version", "devices", "platform", "reason"),
    [
        ("cuda = None\nhip = None\n", ["/dev/nvidia0"], "linux", "without CUDA"),
        ("cuda: str | None = '13.0'\nhip: str | None = None\n", [], "linux", "no NVIDIA driver"),
        ("cuda: str | None = '13.0'\nhip: str | None = None\n", ["/dev/dxg"], "linux", None),
        ("cuda: str | None = '13.0'\nhip: str | None = None\n", [], "win32", None),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", [], "linux", None),
        (None, [], "linux", None),
    ],
)
def test_only_what_is_certain_is_said(
    monkeypatch: pytest.MonkeyPatch, version: str | None, devices: list[str], platform: str, reason: str | None
) -> None:
    monkeypatch.setattr(cuda_driver, "_torch_version_file", lambda: version)
    monkeypatch.setattr(cuda_driver.glob, "glob", lambda pattern: [name for name in devices if name[:7] == pattern[:7]])
    monkeypatch.setattr(cuda_driver.sys, "platform", platform)
    found = cuda_unavailable_reason()
    assert (reason in found) if reason else found == ""
