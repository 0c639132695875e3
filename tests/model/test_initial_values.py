"""Initial values and learning rates by the role of a parameter, and the same values however the network is split."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.config import ModelConfig
from megatron.kernels.initial_values import Distribution
from megatron.model.initial_values import ParameterRole, initial_std, lr_multiplier
from megatron.parallel.shard_spec import shard_spec_of
from tests.helpers.networks import build_gpt, tiny_config

FIRST, SECOND = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight"
TABLE, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
ROUTER = "decoder.layers.0.mlp.router.weight"


def config(**changes: Any) -> ModelConfig:
    """Eight blocks of width 64, with a head of its own."""
    sizes = {"num_layers": 8, "hidden_size": 64, "untie_embeddings_and_output_weights": True, "init_method_std": 0.02}
    return tiny_config(**{**sizes, **changes})


def deviations(model: ModelConfig) -> dict[str, float]:
    """The standard deviation that the spec of every matrix names."""
    specs = {name: shard_spec_of(parameter) for name, parameter in build_gpt(model).named_parameters()}
    return {name: spec.init_std for name, spec in specs.items() if spec.is_matrix}


def test_weights_are_normal_and_residual_outputs_scaled_unless_asked_otherwise() -> None:
    model = config(init_method_std=0.1)
    for name, parameter in build_gpt(model).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "layernorm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            into_residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            expected = 0.1 / math.sqrt(16) if into_residual else 0.1
            rows = parameter[:101] if name in (TABLE, HEAD) else parameter
            assert rows.std().item() == pytest.approx(expected, rel=0.1)


SMALL = math.sqrt(2 / (5 * 64))


@pytest.mark.parametrize(
    ("changes", "first", "second", "table", "head"),
    [
        ({"init_method_std": 0.3, "output_layer_init_method": "same"}, 0.3, 0.3, 0.3, 0.3),
        ({"init_method": "small", "output_layer_init_method": "wang"}, SMALL, 2 / (8 * 8), SMALL, SMALL),
        ({"init_method": "small", "embedding_init_method_std": 0.1}, SMALL, SMALL / 4, 0.1, SMALL),
        (
            {"init_method_xavier_uniform": True},
            math.sqrt(2 / (64 + 256)),
            math.sqrt(2 / (64 + 256)),
            math.sqrt(2 / (64 + 101)),
            math.sqrt(2 / (64 + 101)),
        ),
    ],
    ids=["same", "small and wang", "embedding of its own", "xavier"],
)
def test_standard_deviations(changes: dict[str, Any], first: float, second: float, table: float, head: float) -> None:
    found = deviations(config(**changes))
    assert [found[name] for name in (FIRST, SECOND, TABLE, HEAD)] == pytest.approx([first, second, table, head])


def test_every_expert_is_a_matrix_of_its_own() -> None:
    changes = {"num_experts": 4, "moe_ffn_hidden_size": 32, "init_method": "xavier_normal"}
    assert deviations(config(**changes))["decoder.layers.0.mlp.experts.linear_fc1.weight"] == math.sqrt(2 / (64 + 32))


@pytest.mark.parametrize(
    ("method", "distribution", "largest"),
    [
        ("xavier_uniform", Distribution.UNIFORM, math.sqrt(3)),
        ("xavier_normal", Distribution.NORMAL, 6.66),
        ("truncated_normal", Distribution.TRUNCATED_NORMAL, 3.0),
    ],
)
def test_distributions(method: str, distribution: Distribution, largest: float) -> None:
    model = config(init_method=method, output_layer_init_method="wang", embedding_init_method_std=0.1)
    parameters = dict(build_gpt(model).named_parameters())
    assert shard_spec_of(parameters[FIRST]).init_distribution is distribution
    for name in (SECOND, TABLE):  # these name a normal distribution themselves
        assert shard_spec_of(parameters[name]).init_distribution is Distribution.NORMAL
    values = parameters[FIRST].detach() / shard_spec_of(parameters[FIRST]).init_std
    assert 0.9 * min(largest, 4.0) < values.abs().max() <= largest * 1.000001


def test_mup_scales_with_the_width() -> None:
    changes = {"num_experts": 4, "use_mup": True, "mup_base_hidden_size": 16, "moe_layer_pattern": (1, 0)}
    model = config(**changes)
    found = deviations(model)
    assert found[TABLE] == found[HEAD] == 0.02
    assert found["decoder.layers.1.mlp.linear_fc1.weight"] == 0.02 / 2
    assert found["decoder.layers.1.mlp.linear_fc2.weight"] == 0.02 / math.sqrt(16) / 2
    assert found[ROUTER] == 0.02 / 4
    inside = {ParameterRole.HIDDEN, ParameterRole.RESIDUAL_OUTPUT, ParameterRole.ROUTER}
    assert {role: lr_multiplier(model, role) for role in ParameterRole} == {
        role: 0.25 if role in inside else 1.0 for role in ParameterRole
    }
    rates = {shard_spec_of(parameter).lr_multiplier for parameter in build_gpt(model).parameters()}
    assert rates == {0.25, 1.0}


def test_at_the_base_width_mup_changes_no_initial_value() -> None:
    for changes in ({}, {"init_method": "small", "output_layer_init_method": "wang"}):
        assert deviations(config(**changes)) == deviations(config(use_mup=True, mup_base_hidden_size=64, **changes))


def test_widths_that_the_method_itself_divides_by_are_base_widths_under_mup() -> None:
    model = config(use_mup=True, mup_base_hidden_size=16, init_method="small", output_layer_init_method="wang")
    widths = {"fan_in": 64, "fan_out": 64}
    assert initial_std(model, ParameterRole.HIDDEN, **widths) == pytest.approx(SMALL)
    assert initial_std(model, ParameterRole.RESIDUAL_OUTPUT, **widths) == pytest.approx(2 / (8 * 8))
    assert initial_std(model, ParameterRole.EMBEDDING, **widths) == pytest.approx(math.sqrt(2 / (5 * 16)))
