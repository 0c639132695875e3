"""Which network the stored arguments of each fork stand for."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.errors import ConversionError
from tests.trident.convert.foreign.foreign_files import gpt2_arguments
from trident.convert.megatron_format.arguments import fork_of, gate_is_last, model_config


def stored(**changes: Any) -> dict[str, Any]:
    """The arguments of a bigscience run, without the enumeration."""
    return vars(gpt2_arguments(position_embedding_type="absolute", **changes))


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """The same without some arguments."""
    return {name: value for name, value in values.items() if name not in names}


DEEPSPEEDAI = without(
    stored(num_key_value_heads=2, use_rotary_position_embeddings=True), "glu_activation", "position_embedding_type"
)
NVIDIA = without(stored(transformer_impl="local"), "glu_activation", "deepspeed", "position_embedding_type")


def test_forks_are_distinguished() -> None:
    assert [fork_of(values) for values in (stored(), DEEPSPEEDAI, NVIDIA)] == ["bigscience", "deepspeedai", "nvidia"]


@pytest.mark.parametrize(
    ("values", "is_core", "expected"),
    [
        (NVIDIA, True, "gelu_tanh"),
        (NVIDIA | {"bias_gelu_fusion": False, "openai_gelu": True}, True, "gelu"),  # its modules know no such form
        (NVIDIA | {"bias_gelu_fusion": False, "openai_gelu": True}, False, "gelu_tanh"),
        (NVIDIA | {"add_bias_linear": False}, True, "gelu"),  # the fused kernel needs a bias
        (NVIDIA | {"add_bias_linear": False}, False, "gelu"),
        (without(NVIDIA, "bias_gelu_fusion"), True, "gelu"),
        (without(NVIDIA, "bias_gelu_fusion") | {"bias_activation_fusion": True}, True, "gelu_tanh"),
        (without(NVIDIA, "bias_gelu_fusion"), False, "gelu_tanh"),
        (NVIDIA | {"onnx_safe": True}, False, "gelu"),
        (NVIDIA | {"onnx_safe": True}, True, "gelu_tanh"),
        (stored(onnx_safe=True), False, "gelu_tanh"),
        (stored(onnx_safe=True, bias_gelu_fusion=False), False, "gelu"),
    ],
)
def test_gelu_has_the_form_that_the_program_computed(values: dict[str, Any], is_core: bool, expected: str) -> None:
    assert model_config(values, 600, is_core=is_core).activation_function == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (stored(), {"position_embedding_type": "learned_absolute", "activation_function": "gelu_tanh"}),
        (stored(bias_gelu_fusion=False), {"activation_function": "gelu"}),
        (stored(bias_gelu_fusion=False, openai_gelu=True), {"activation_function": "gelu_tanh"}),
        (stored(glu_activation="liglu"), {"activation_function": "linear", "gated_linear_unit": True}),
        (stored(embed_layernorm=True), {"embed_layernorm": True}),
        (
            NVIDIA | {"position_embedding_type": "rope", "rotary_base": 5000, "rotary_percent": 0.5},
            {"position_embedding_type": "rope", "rotary_base": 5000.0, "rotary_percent": 0.5},
        ),
        (
            NVIDIA | {"position_embedding_type": "rope", "use_rope_scaling": True, "rope_scaling_factor": 32.0},
            {"rope_scaling_type": "llama3", "rope_scaling_factor": 32.0, "rope_original_max_positions": 8192},
        ),
        (
            NVIDIA | {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": 4},
            {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0},
        ),
        (NVIDIA | {"use_rotary_position_embeddings": True}, {"position_embedding_type": "rope"}),
        (NVIDIA | {"num_query_groups": 1}, {"num_query_groups": 4}),  # only with group_query_attention
        (NVIDIA | {"num_query_groups": 1, "group_query_attention": True}, {"num_query_groups": 1}),
        (NVIDIA | {"add_bias_linear": False, "add_qkv_bias": True}, {"add_qkv_bias": True, "mlp_bias": False}),
        (NVIDIA | {"normalization": "RMSNorm", "apply_layernorm_1p": True}, {"apply_layernorm_1p": True}),
        (NVIDIA | {"squared_relu": True}, {"activation_function": "squared_relu"}),
        (NVIDIA | {"window_size": (7, 0)}, {"attention_window": 8}),
        (without(DEEPSPEEDAI, "use_rotary_position_embeddings"), {"position_embedding_type": "learned_absolute"}),
        (
            without(DEEPSPEEDAI, "use_rotary_position_embeddings") | {"add_position_embedding": False},
            {"position_embedding_type": "none"},
        ),
        (
            without(DEEPSPEEDAI, "use_rotary_position_embeddings")
            | {"normalization": "rmsnorm", "apply_layernorm_1p": True},
            {"normalization": "RMSNorm", "apply_layernorm_1p": False},  # which that fork ignores
        ),
        (DEEPSPEEDAI | {"ds_sequence_parallel_size": 2}, {"position_embedding_type": "rope", "num_query_groups": 2}),
    ],
)
def test_arguments_mean_what_they_mean_there(values: dict[str, Any], expected: dict[str, Any]) -> None:
    config = model_config(values, 600)
    assert {name: getattr(config, name) for name in expected} == expected


def test_bigscience_keeps_the_gate_last() -> None:
    assert gate_is_last(stored(glu_activation="swiglu")) and not gate_is_last(NVIDIA | {"swiglu": True})


def test_the_broken_rotation_is_refused_by_its_cause() -> None:
    with pytest.raises(ConversionError, match="by the cosine of the angle"):
        model_config(DEEPSPEEDAI, 600)
    assert model_config(DEEPSPEEDAI, 600, rotary_is_sound=True).position_embedding_type == "rope"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (stored(num_experts=[8]), "num_experts = 8"),
        (NVIDIA | {"multi_latent_attention": True}, "multi_latent_attention = True"),
        (NVIDIA | {"position_embedding_type": "mrope"}, "position_embedding_type = 'mrope'"),
        (NVIDIA | {"normalization": "DeepNorm"}, "normalization = deepnorm"),
        (stored(glu_activation="gau"), "glu_activation = 'gau'"),
        (without(stored(), "num_layers"), "num_layers = None"),
        (stored(num_attention_heads=5, kv_channels=None), "hidden-size 32 is not divisible"),
    ],
)
def test_other_networks_are_refused_by_name_and_value(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConversionError, match=said):
        model_config(values, 600)
