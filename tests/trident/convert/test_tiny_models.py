"""The tiny models show mistakes: with any field of the architecture read wrongly, the logits are others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import ModelConfig
from megatron.inference.loaded_model import load_weights
from megatron.model.gpt import gpt_layers
from megatron.model.interface.network import LayerStack
from tests.trident.convert.comparison import MESH, logits_of, relative, run_config
from tests.trident.convert.tiny_models import CONTEXT, TINY_MODELS, WINDOW, build_tiny_model, sample_tokens

MISTAKES: dict[str, list[dict[str, Any]]] = {
    "gpt2": [{"activation_function": "gelu"}, {"layernorm_epsilon": 1e-3}],
    "gpt2-inner": [{"activation_function": "silu"}, {"layernorm_epsilon": 1e-5}],
    "neox-parallel": [
        {"rotary_percent": 0.5}, {"parallel_residual": False}, {"activation_function": "gelu_tanh"},
        {"rotary_interleaved": True},
    ],
    "bloom-12": [{"position_embedding_type": "none"}],
    "bloom-residual-after-norm": [{"apply_residual_connection_post_layernorm": False}],
    "llama-grouped-llama3": [
        {"rope_scaling_type": "none"}, {"rope_scaling_factor": 4.0}, {"rope_high_freq_factor": 8.0},
        {"rope_original_max_positions": 2 * CONTEXT},
    ],
    "llama-multi-query-linear": [{"rope_scaling_factor": 2.0}],
    "llama-dynamic": [{"rope_scaling_type": "none"}, {"rope_original_max_positions": 64}],
    "llama-yarn": [{"rope_attention_factor": 1.0}, {"rope_beta_slow": 0.5}],
    "llama-biases": [{"rotary_base": 10000.0}],
    "mistral": [{"attention_window": None}, {"attention_window": WINDOW + 1}, {"layernorm_epsilon": 1e-5}],
    "qwen2-window": [{"attention_window_pattern": ()}, {"attention_window_pattern": (0, 0, 0, 1)}],
    "gemma2": [
        {"attention_logit_softcap": None}, {"output_logit_softcap": None}, {"softmax_scale": None},
        {"embedding_multiplier": 1.0}, {"apply_layernorm_1p": False}, {"attention_window_pattern": (0, 1)},
        {"activation_function": "gelu"},
    ],
    "olmo3": [
        {"rotary_base_windowed": 10000.0}, {"rope_scaling_type": "none"}, {"attention_window_pattern": (1, 0)},
    ],
    "smollm3": [{"rope_layer_pattern": ()}, {"rope_layer_pattern": (0, 1)}],
    "granite": [
        {"embedding_multiplier": 1.0}, {"residual_multiplier": 1.0}, {"softmax_scale": None}, {"logit_multiplier": 1.0},
    ],
    "gemma3": [{"rotary_base_windowed": None}, {"rope_scaling_type": "none"}],
    "phi3-short": [{"rope_original_max_positions": CONTEXT}, {"rope_attention_factor": 1.0}],
    "mixtral": [{"moe_router_pre_softmax": True}, {"moe_router_topk": 3}],
    "qwen3-moe-plain": [{"moe_router_pre_softmax": False}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mistake"),
    [(name, mistake) for name, mistakes in MISTAKES.items() for mistake in mistakes],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_mistake_changes_the_logits(
    name: str, mistake: dict[str, Any], imported_model: Callable[[str], Path]
) -> None:
    model = run_config(imported_model(name)).model
    tokens = sample_tokens()
    right, wrong = (_logits(imported_model(name), config, tokens) for config in (model, _changed(model, mistake)))
    assert relative(wrong, right) > 2e-5


def test_every_vector_is_random() -> None:
    for name in TINY_MODELS:
        for parameter_name, parameter in build_tiny_model(name).named_parameters():
            assert parameter.std() > 0.01, (name, parameter_name)


def _changed(model: ModelConfig, mistake: dict[str, Any]) -> ModelConfig:
    return dataclasses.replace(model, **mistake)


def _logits(checkpoints: Path, model: ModelConfig, tokens: torch.Tensor) -> torch.Tensor:
    network = LayerStack(gpt_layers(model, MESH)).eval()
    load_weights(network, checkpoints, MESH)
    with torch.no_grad():
        return logits_of(network, tokens, model)
