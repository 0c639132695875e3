"""Damaged or incomplete optimizer shards of DeepSpeed are refused, and older ones are explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.convert.deepspeed_format.zero import read_shards, shapes_of
from megatron.errors import ConversionError
from tests.convert.foreign_files import save

SHAPES: dict[int, Any] = {0: [{"a": (3, 2), "b": (2,)}]}


def stage_three(rank: int) -> dict[str, Any]:
    """One of two ranks' shares: 3 of a's 6 elements, 1 of b's 2."""
    values = torch.arange(4.0) + 10 * rank
    inner = {"state": {0: {"exp_avg": values + 100, "exp_avg_sq": values + 200, "step": torch.tensor(5.0)}}}
    return {"fp32_flat_groups": [values], "optimizer_state_dict": inner, "partition_count": 2, "zero_stage": 3}


def write(folder: Path, *states: dict[str, Any]) -> Path:
    """The optimizer files of data-parallel ranks."""
    for rank, state in enumerate(states):
        save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def test_shares_are_put_together(tmp_path: Path) -> None:
    found = read_shards(write(tmp_path, stage_three(0), stage_three(1)), SHAPES)
    values = {(name, kind): part.read().flatten().tolist() for _, name, kind, part in found.tensors}
    assert values["a", "weight"] == [0, 1, 2, 10, 11, 12] and values["b", "exp_avg"] == [103, 113]
    assert values["a", "exp_avg_sq"] == [200, 201, 202, 210, 211, 212]
    assert found.updates == 5 and found.problem is None


def test_missing_shards_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="1 optimizer shards of model-parallel rank 0, not 2"):
        read_shards(write(tmp_path, stage_three(0)), SHAPES)


def test_shards_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConversionError, match=r"hold 6 elements of a \(weight\), whose shape is \[4, 2\]|elements up to"
    ):
        states = [stage_three(0), stage_three(1)]
        read_shards(write(tmp_path / "more", *states), {0: [{"a": (4, 2), "b": (2,)}]})
    short = {**stage_three(1), "fp32_flat_groups": [torch.arange(2.0)]}
    with pytest.raises(ConversionError, match="elements up to 3 for a, and has 2"):
        read_shards(write(tmp_path / "short", stage_three(0), short), SHAPES)
    mapping = {"single_partition_of_fp32_groups": [torch.arange(4.0)], "param_slice_mappings": [{"a": 5}]}
    with pytest.raises(ConversionError, match=r"hold 0 elements of a \(weight\)"):
        read_shards(write(tmp_path / "mapping", mapping), SHAPES)
    with pytest.raises(ConversionError, match="holds no optimizer_state_dict"):
        save([1], tmp_path / "list" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        read_shards(tmp_path / "list", SHAPES)


def test_what_older_versions_leave_out_is_explained(tmp_path: Path) -> None:
    assert "no optimizer states" in str(read_shards(tmp_path, SHAPES).problem)
    older = {"single_partition_of_fp32_groups": [torch.arange(8.0)], "base_optimizer_state": {}}
    assert "older DeepSpeed" in str(read_shards(write(tmp_path, older), SHAPES).problem)
    assert shapes_of({"param_shapes": {"a": (2,)}}) == [{"a": (2,)}] and shapes_of({}) == []
