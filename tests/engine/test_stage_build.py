"""Building a rank's layers: under ZeRO-3 a rank keeps and draws its own part of each layer, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from megatron.engine import stage_build
from megatron.parallel.joining import open_mesh
from megatron.parallel.shard_spec import shard_spec_of
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.networks import SEED, build_gpt
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=2, steps=2)


def build_under_stage_three(rank: int, layout: tuple[int, int, int]) -> dict[str, Any]:
    """What a rank holds and drew before DeepSpeed wraps it."""
    config = layout_config(RECIPE, layout, 3, ["--seed", str(SEED)])
    mesh = open_mesh(config.parallel)
    drawn, whole_layers = [], []
    normal, build = stage_build.draw_weights_, stage_build.build_layer

    def counted_normal(target: torch.Tensor, *arguments: Any, **settings: Any) -> torch.Tensor:
        drawn.append(target.numel())
        return normal(target, *arguments, **settings)

    def measured_build(*arguments: Any) -> nn.Module:
        module = build(*arguments)
        whole_layers.append(sum(parameter.numel() for parameter in module.parameters()))
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_build, "draw_weights_", counted_normal)
        patch.setattr(stage_build, "build_layer", measured_build)
        engine = build_engine(config, mesh)
    parts = {p.global_name: p.ds_tensor.detach().clone() for p in engine.module.parameters()}
    matrices = sum(p.ds_numel for p in engine.module.parameters() if shard_spec_of(p).is_matrix)
    return {"parts": parts, "drawn": sum(drawn), "matrices": matrices, "left_whole": sum(whole_layers)}


def test_a_rank_keeps_and_draws_its_own_part_of_each_layer() -> None:
    config = layout_config(RECIPE, (1, 1, 1), 0, ["--seed", str(SEED)])
    whole = {name: parameter.detach().flatten() for name, parameter in build_gpt(config.model).named_parameters()}
    ranks = run_ranks(build_under_stage_three, 2, (1, 1, 2))
    for rank in ranks:
        assert rank["left_whole"] == 0, "a layer was left whole after it had been built"
        assert rank["drawn"] <= rank["matrices"] / 2 + 8
    for name, values in whole.items():
        joined = torch.cat([rank["parts"][name].flatten() for rank in ranks])[: values.numel()]
        assert torch.equal(joined, values), name


def dtypes_under_stage_three(rank: int) -> dict[tuple[bool, str], set[torch.dtype]]:
    """The dtypes of the parameters, on devices that compute in float16 and on those that do not."""
    found, mesh = {}, None
    for computes_in_half in (False, True):
        for flags in ([], ["--bf16"]):
            config = layout_config(RECIPE, (1, 1, 1), 3, flags)
            mesh = mesh or open_mesh(config.parallel)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(get_accelerator(), "is_fp16_supported", lambda answer=computes_in_half: answer)
                engine = build_engine(config, mesh)
            found[computes_in_half, " ".join(flags)] = {p.ds_tensor.dtype for p in engine.module.parameters()}
    return found


def test_the_dtype_is_the_run_s_whatever_the_device_supports() -> None:
    (found,) = run_ranks(dtypes_under_stage_three, 1)
    assert found == {
        (half, flag): {torch.bfloat16 if flag else torch.float32} for half in (False, True) for flag in ("", "--bf16")
    }
