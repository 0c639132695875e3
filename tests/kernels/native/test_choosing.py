"""The choice by flag, by available implementations, and by measured speed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.config.sections.computation import OPERATIONS, KernelConfig
from megatron.errors import ConfigError
from megatron.kernels.choice import Implementation
from megatron.kernels.native import choosing
from megatron.kernels.native.choosing import choose, implementations
from megatron.kernels.native.library import Library

CPU = torch.device("cpu")


def _requested(**fields: object) -> dict[str, str]:
    return dict(KernelConfig(**fields).requested)  # type: ignore[arg-type]


def test_what_is_asked_for_is_used_where_it_is_there(compiled: Library, tmp_path: Path) -> None:
    chosen = choose(_requested(kernels="torch,dropout_add=csrc"), CPU, compiled.folder)
    assert [name for name in OPERATIONS if getattr(chosen, name) is Implementation.CSRC] == ["dropout_add"]
    assert choose(_requested(kernels="torch"), CPU, compiled.folder).norm is Implementation.TORCH
    assert implementations("dropout_add", CPU, tmp_path) == {Implementation.TORCH}
    with pytest.raises(ConfigError, match=r"requires csrc \(dropout_add\), but .* has no library with these for cpu"):
        choose(_requested(kernels="dropout_add=csrc"), CPU, tmp_path)


def test_auto_takes_the_fastest_that_is_there(
    compiled: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, frozenset[Implementation]]] = []

    def fastest(operation: str, device_type: str, available: frozenset[Implementation]) -> Implementation:
        asked.append((operation, device_type, available))
        return max(available)

    monkeypatch.setattr(choosing, "fastest", fastest)
    assert choose({}, CPU, tmp_path).dropout_add is Implementation.TORCH
    choose({}, CPU, compiled.folder)
    assert [name for name, _, _ in asked] == [*OPERATIONS, *OPERATIONS]
    assert ("dropout_add", "cpu", frozenset({Implementation.TORCH, Implementation.CSRC})) in asked
