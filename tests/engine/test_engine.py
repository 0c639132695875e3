"""What the engine decides before and around DeepSpeed: optimizer groups, who accounts for a parameter, clipping."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from megatron.engine.objective import LanguageModelObjective
from torch import nn

from megatron.engine.engine import build_module, build_optimizer, counts_here
from megatron.errors import ConfigError
from megatron.model.gpt import DenseGPT
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh, standard_axes
from megatron.train.build import build_engine, parameter_counts
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe
from tests.train.samples import model_config, optim_config

RECIPE = dataclasses.replace(Recipe(), num_layers=1, steps=2, weight_decay=0.0)


def small_module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4))


def names_of(module: nn.Module, group: dict) -> set[str]:
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    return {known[id(parameter)] for parameter in group["params"]}


def test_matrices_decay_and_biases_and_norms_do_not() -> None:
    module = small_module()
    matrices, others = build_optimizer(optim_config(weight_decay=0.3), module).param_groups
    assert names_of(module, matrices) == {"0.weight", "2.weight"}
    assert names_of(module, others) == {"0.bias", "1.weight", "1.bias"}
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.3, 0.0)


def test_frozen_parameters_are_left_out() -> None:
    module = small_module()
    module[2].weight.requires_grad_(False)
    assert names_of(module, build_optimizer(optim_config(), module).param_groups[0]) == {"0.weight"}


def test_adam_takes_its_flags() -> None:
    optim = optim_config(lr=2e-3, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6)
    optimizer = build_optimizer(optim, small_module())
    assert type(optimizer) is torch.optim.AdamW
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (2e-3, (0.8, 0.95), 1e-6)


def test_sgd_takes_its_flags() -> None:
    optimizer = build_optimizer(optim_config(optimizer="sgd", lr=0.5, sgd_momentum=0.7), small_module())
    assert type(optimizer) is torch.optim.SGD
    assert {(group["lr"], group["momentum"]) for group in optimizer.param_groups} == {(0.5, 0.7)}


@pytest.mark.parametrize(
    "module", [nn.LayerNorm(4), nn.Linear(3, 4, bias=False)], ids=["without a matrix", "without a bias"]
)
def test_a_stage_without_one_of_the_groups_is_refused(module: nn.Module) -> None:
    with pytest.raises(ConfigError, match="holds no matrix or no bias/norm parameter.*--pipeline-model-parallel-size"):
        build_optimizer(optim_config(), module)


def test_an_unknown_optimizer_is_refused() -> None:
    optim = SimpleNamespace(optimizer="lamb", lr=1.0, weight_decay=0.0)  # the flag itself refuses it earlier
    with pytest.raises(ConfigError, match="--optimizer lamb is not known. Use adam or sgd"):
        build_optimizer(optim, small_module())


def mesh_at(tp_rank: int, tp_size: int = 2) -> ParallelMesh:
    return ParallelMesh.at(standard_axes(tp_size, tp=tp_size), rank=tp_rank)


@pytest.mark.parametrize(
    ("tp_rank", "is_split", "is_copy", "expected"),
    [
        (0, False, False, True),
        (1, False, False, False),
        (0, True, False, True),
        (1, True, False, True),
        (0, False, True, False),
        (1, True, True, False),
    ],
)
def test_one_rank_accounts_for_each_parameter(tp_rank: int, is_split: bool, is_copy: bool, expected: bool) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    if is_split:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    if is_copy:
        parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]
    assert counts_here(parameter, mesh_at(tp_rank)) is expected


def test_one_stage_is_the_plain_module() -> None:
    mesh = ParallelMesh.single()
    assert type(build_module(model_config(), mesh, {}, LanguageModelObjective(mesh, 90))) is DenseGPT


def train_with_clipping(rank: int, clip: float, zero_stage: int) -> dict[str, object]:
    """Trains one global batch and says how far the weights moved."""
    config = layout_config(RECIPE, (1, 1, 1), zero_stage, ["--clip-grad", str(clip), "--optimizer", "sgd"])
    mesh = open_mesh(config.parallel)
    engine = build_engine(config, mesh)
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    result = engine.train_batch(local_batches(RECIPE, config, mesh, 0, False), 1.0)
    moved = [after.detach() - start for after, start in zip(engine.module.parameters(), before, strict=True)]
    engine.evaluate(local_batches(RECIPE, config, mesh, 1, False))
    return {
        "norm": result.gradient_norm,
        "moved": float(torch.linalg.vector_norm(torch.cat([part.flatten() for part in moved]))),
        "samples": result.sample_count,
        "tokens": result.token_count,
        "skipped": result.skipped,
        "loss_scale": result.loss_scale,
        "counts": parameter_counts(engine),
        "is_training": engine.module.training,
    }


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_clipping_limits_the_step_and_the_norm_is_the_one_before(zero_stage: int) -> None:
    """With SGD, a rate of 1 and no decay, the first step is as long as the gradient after clipping."""
    (free,) = run_ranks(train_with_clipping, 1, 0.0, zero_stage)
    (clipped,) = run_ranks(train_with_clipping, 1, 0.25, zero_stage)
    assert free["norm"] > 0.5
    assert free["moved"] == pytest.approx(free["norm"], rel=1e-4)
    assert clipped["norm"] == pytest.approx(free["norm"], rel=1e-6)
    assert clipped["moved"] == pytest.approx(0.25, rel=1e-4)


def test_a_step_says_what_it_did() -> None:
    (result,) = run_ranks(train_with_clipping, 1, 1.0, 1)
    size, inner = RECIPE.hidden_size, 4 * RECIPE.hidden_size
    block = 4 * size * size + 2 * size * inner + (3 + 1 + 1 + 4) * size + inner
    blocks = block * RECIPE.num_layers + 2 * size
    padded_words = 152  # 150 words, rows divisible by 8
    assert result["counts"] == (blocks + (padded_words + RECIPE.sequence_length) * size, blocks)
    assert result["samples"] == RECIPE.global_batch_size
    assert result["tokens"] == RECIPE.global_batch_size * RECIPE.sequence_length
    assert (result["skipped"], result["loss_scale"], result["is_training"]) == (False, 1.0, True)
