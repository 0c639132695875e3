"""All ranks of a run use the same kernels."""

from __future__ import annotations

import types

import pytest
import torch

from megatron.config.sections.computation import OPERATIONS
from megatron.kernels.choice import Implementation, Kernels
from megatron.parallel import kernels as subject
from megatron.parallel.kernels import agreed_kernels, kernels_line
from megatron.parallel.mesh import STANDARD_ROLES, AxisSize, ParallelMesh

MESH = ParallelMesh.at([AxisSize(name, 1, role) for name, role in STANDARD_ROLES], 0)


def test_ranks_that_differ_use_torch(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def with_another_rank(places: torch.Tensor, axis: object) -> torch.Tensor:
        others = places.clone()
        if places.dim() == 1:  # digests
            return places
        others[OPERATIONS.index("norm")] = torch.tensor([1, 0])  # torch
        return torch.maximum(places, others)

    monkeypatch.setattr(subject, "choose", lambda requested, device: Kernels.all(Implementation.CSRC))
    assert agreed_kernels({}, MESH) == Kernels.all(Implementation.CSRC)
    monkeypatch.setattr(subject, "all_reduce_max", with_another_rank)
    found = agreed_kernels({}, MESH)
    assert found == Kernels.all(Implementation.CSRC).replace({"norm": Implementation.TORCH})
    said = "".join(capfd.readouterr())
    assert "not all ranks have the same kernels, so all use torch for norm. Build the library on every node" in said
    assert kernels_line(found).startswith("kernels: torch: norm; csrc: softmax, activation, dropout_add")


@pytest.mark.parametrize(("other", "agrees"), [("a" * 64, True), ("b" * 64, False), ("", False), (None, True)])
def test_ranks_whose_libraries_have_other_sources_use_torch(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], other: str | None, agrees: bool
) -> None:
    chosen = Kernels(norm=Implementation.CSRC, rotary=Implementation.CSRC)
    sources = ["a" * 64, other]

    def with_another_rank(tensor: torch.Tensor, axis: object) -> torch.Tensor:
        if tensor.dim() == 2:
            return tensor
        if other is None:  # a rank without a library has other implementations too, which is noticed by these
            return torch.maximum(tensor, torch.full((2,), -(1 << 62)))
        digest = int(other[:15] or "0", 16)
        return torch.maximum(tensor, torch.tensor([digest, -digest]))

    monkeypatch.setattr(subject, "choose", lambda requested, device: chosen)
    monkeypatch.setattr(subject, "library", lambda: types.SimpleNamespace(sources=sources[0]))
    assert agreed_kernels({}, MESH) == chosen
    monkeypatch.setattr(subject, "all_reduce_max", with_another_rank)
    assert agreed_kernels({}, MESH) == (chosen if agrees else Kernels())
    said = "".join(capfd.readouterr())
    assert ("so all use torch for norm, rotary. Build" in said) is not agrees
