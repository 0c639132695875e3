"""Optimizer groups of the engine, the result of a step, its losses and its phases."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

from megatron.config.sections.optimizers import OPTIMIZERS
from megatron.engine.deepspeed_setup import build_optimizer, set_rates
from megatron.engine.engine import Engine
from megatron.engine.optimizers.plans import PLANS, plan_of
from megatron.errors import ConfigError
from megatron.objective.language_model import Z_LOSS
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import shard_spec_of
from megatron.train.start_up.engine_opening import build_engine, parameter_counts
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe
from tests.train.samples import optim_config

RECIPE = dataclasses.replace(Recipe(), num_layers=1, steps=2, weight_decay=0.0)


def small_module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4))


def names_of(module: nn.Module, group: dict) -> set[str]:
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    return {known[id(parameter)] for parameter in group["params"]}


def test_only_matrices_have_weight_decay() -> None:
    module = small_module()
    optimizer = build_optimizer(plan_of(optim_config(weight_decay=0.3)), module, ParallelMesh.single())
    matrices, others = optimizer.param_groups
    assert names_of(module, matrices) == {"0.weight", "2.weight"}
    assert names_of(module, others) == {"0.bias", "1.weight", "1.bias"}
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.3, 0.0)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-6}, {"betas": (0.8, 0.95), "eps": 1e-6}),
        ({"optimizer": "sgd", "sgd_momentum": 0.7}, {"momentum": 0.7}),
    ],
)
def test_an_optimizer_uses_its_flags(flags: dict[str, Any], expected: dict[str, Any]) -> None:
    optimizer = build_optimizer(plan_of(optim_config(lr=0.5, **flags)), small_module(), ParallelMesh.single())
    assert isinstance(optimizer, torch.optim.SGD if "optimizer" in flags else torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert group.items() >= {"lr": 0.5, **expected}.items()


def test_groups_differ_in_weight_decay_and_learning_rate() -> None:
    module = small_module()
    embedding = module[2].weight
    embedding.shard_spec = dataclasses.replace(shard_spec_of(embedding), lr_multiplier=0.25)
    optimizer = build_optimizer(plan_of(optim_config(weight_decay=0.3, adam_eps=1e-6)), module, ParallelMesh.single())
    assert [names_of(module, group) for group in optimizer.param_groups] == [
        {"2.weight"},
        {"0.weight"},
        {"0.bias", "1.weight", "1.bias"},
    ]
    set_rates(optimizer, 0.8)
    found = [(group["lr"], group["eps"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(0.2, 0.25e-6, 0.3), (0.8, 1e-6, 0.3), (0.8, 1e-6, 0.0)]
    set_rates(optimizer, 0.8, 0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.5, 0.0]


def test_each_optimizer_keeps_as_many_moments_as_are_predicted() -> None:
    vector, matrix = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 2))
    matrix.global_name = "decoder.layers.0.weight"
    assert tuple(PLANS) == OPTIMIZERS
    for name in OPTIMIZERS:
        optim = optim_config(optimizer=name, lr_decay_style="constant")
        for parameter, of_blocks in ((vector, False), (matrix, True)):
            assert 4 * len(plan_of(optim).moments_of(parameter)) == optim.state_bytes(of_blocks=of_blocks)


def test_muon_does_not_work_on_the_host() -> None:
    optim = optim_config(optimizer="muon")
    with pytest.raises(ConfigError, match="offload_optimizer in the --deepspeed_config file.*Remove the entry"):
        build_optimizer(plan_of(optim), small_module(), ParallelMesh.single(), is_offloaded=True)


def engine_of(layout: tuple[int, int, int], stage: int, *flags: str) -> Engine:
    recipe = dataclasses.replace(RECIPE, num_layers=layout[1])
    config = layout_config(recipe, layout, stage, list(flags))
    return build_engine(config, open_mesh(config.parallel))


def decayed(rank: int) -> dict[int, set[tuple[bool, float]]]:
    """What a step with a weight decay of its own does to matrices (True) and vectors, by ZeRO stage.

    The learning rate is so small that only the decay, which it multiplies, moves the weights.
    """
    found = {}
    for stage, flags in ((0, ["--optimizer", "adam"]), (1, ["--optimizer", "adam", "--bf16"])):
        config = layout_config(RECIPE, (1, 1, 1), stage, flags)
        engine = engine_of((1, 1, 1), stage, *flags)
        before = {p.global_name: p.detach().float().clone() for p in engine.module.parameters()}
        engine.train_batch(local_batches(RECIPE, config, engine.mesh, 0, False), 1e-9, 0.5e9)
        found[stage] = {
            (shard_spec_of(p).is_matrix, round(float(p.detach().float().norm() / before[p.global_name].norm()), 2))
            for p in engine.module.parameters()
            if float(before[p.global_name].norm()) > 0
        }
    return found


def test_a_step_may_have_a_weight_decay_of_its_own() -> None:
    (found,) = run_ranks(decayed, 1)
    assert found == {0: {(True, 0.5), (False, 1.0)}, 1: {(True, 0.5), (False, 1.0)}}


def train_with_clipping(rank: int, clip: float, zero_stage: int) -> dict[str, object]:
    """Trains one global batch and says how far the weights moved."""
    config = layout_config(RECIPE, (1, 1, 1), zero_stage, ["--clip-grad", str(clip), "--optimizer", "sgd"])
    engine = engine_of((1, 1, 1), zero_stage, "--clip-grad", str(clip), "--optimizer", "sgd")
    mesh = engine.mesh
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


def losses_of_two_objectives(rank: int) -> dict[str, list[float]]:
    """Evaluated loss, first training loss and z-loss without and with smoothed labels and z-loss."""
    found: dict[str, list[float]] = {}
    for name, flags in (("plain", ()), ("other", ("--label-smoothing", "0.2", "--z-loss-coeff", "0.01"))):
        config = layout_config(RECIPE, (1, 1, 1), 1, list(flags))
        engine = engine_of((1, 1, 1), 1, *flags)
        batches = local_batches(RECIPE, config, engine.mesh, 0, True)
        loss_sum, tokens = engine.evaluate(batches)
        result = engine.train_batch(batches, 1e-3)
        z_losses = [metric.value for name, metric in result.metrics.items() if name == Z_LOSS]
        found[name] = [loss_sum / tokens, result.loss, result.gradient_norm, *z_losses]
    return found


def test_reported_and_evaluated_losses_are_plain_whatever_is_minimized() -> None:
    (found,) = run_ranks(losses_of_two_objectives, 1)
    plain, (evaluated, trained, norm, z_loss) = found["plain"], found["other"]
    assert [evaluated, trained] == plain[:2]
    assert norm != pytest.approx(plain[2], rel=1e-3)
    assert z_loss == pytest.approx(0.01 * math.log(RECIPE.vocab_size) ** 2, rel=0.05)  # logits are small at first


def test_the_result_of_a_step() -> None:
    (result,) = run_ranks(train_with_clipping, 1, 1.0, 1)
    size, inner = RECIPE.hidden_size, 4 * RECIPE.hidden_size
    block = 4 * size * size + 2 * size * inner + (3 + 1 + 1 + 4) * size + inner
    blocks = block * RECIPE.num_layers + 2 * size
    padded_words = 152  # 150 words, rows divisible by 8
    total = blocks + (padded_words + RECIPE.sequence_length) * size
    assert result["counts"] == (total, blocks, total)
    assert result["samples"] == RECIPE.global_batch_size
    assert result["tokens"] == RECIPE.global_batch_size * RECIPE.sequence_length
    assert (result["skipped"], result["loss_scale"], result["is_training"]) == (False, 1.0, True)


def phases_of_a_step(rank: int, layout: tuple[int, int, int]) -> tuple[list[str], list[str]]:
    """The phases of one step and of one evaluation."""
    config = layout_config(dataclasses.replace(RECIPE, num_layers=layout[1]), layout, 1, [])
    engine = engine_of(layout, 1)
    seen: list[str] = []
    engine.on_phase = seen.append
    engine.train_batch(local_batches(RECIPE, config, engine.mesh, 0, False), 1e-3)
    trained = seen.copy()
    engine.evaluate(local_batches(RECIPE, config, engine.mesh, 0, False))
    return trained, seen[len(trained) :]


def test_phases_are_announced_before_what_may_wait_for_other_ranks() -> None:
    ((trained, evaluated),) = run_ranks(phases_of_a_step, 1, (1, 1, 1))
    assert trained == ["forward", "backward"] * (len(trained) // 2) + ["step"]
    assert set(evaluated) == {"evaluation"}
    for trained, evaluated in run_ranks(phases_of_a_step, 2, (1, 2, 1)):
        assert set(trained) == {"forward", "p2p", "backward", "step"} and trained[-1] == "step"
        assert set(evaluated) == {"evaluation"}
