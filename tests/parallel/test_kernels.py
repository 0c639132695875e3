"""All ranks of a run use the same kernels."""

from __future__ import annotations

import pytest
import torch

from megatron.config.sections.kernels import OPERATIONS
from megatron.kernels.choice import Implementation, Kernels
from megatron.parallel import kernels as subject
from megatron.parallel.kernels import agreed_kernels, kernels_line
from megatron.parallel.mesh import STANDARD_ROLES, AxisSize, ParallelMesh

MESH = ParallelMesh.at([AxisSize(name, 1, role) for name, role in STANDARD_ROLES], 0)


def test_ranks_that_differ_use_torch(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def with_another_rank(places: torch.Tensor, axis: object) -> torch.Tensor:
        others = places.clone()
        others[OPERATIONS.index("norm")] = torch.tensor([1, 0, 0])  # torch
        return torch.maximum(places, others)

    monkeypatch.setattr(subject, "choose", lambda requested, device: Kernels.all(Implementation.CSRC))
    assert agreed_kernels({}, MESH) == Kernels.all(Implementation.CSRC)
    monkeypatch.setattr(subject, "all_reduce_max", with_another_rank)
    found = agreed_kernels({}, MESH)
    assert found == Kernels.all(Implementation.CSRC).replace({"norm": Implementation.TORCH})
    said = "".join(capfd.readouterr())
    assert "not all ranks have the same kernels, so all use torch for norm. Build the library on every node" in said
    assert kernels_line(found).startswith("kernels: torch: norm; csrc: softmax, activation, dropout_add")
