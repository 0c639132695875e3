"""The arguments of a run are those that the importer reads, or the network is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron.checkpoint.record import Progress
from megatron.config import ModelConfig
from megatron.errors import ConversionError
from tests.helpers.networks import tiny_config
from trident.convert.megatron_format.arguments import model_config, scheduler_state, stored_arguments

PROGRESS = Progress(4, 32, 512)
RUN: dict[str, Any] = {
    "global_batch_size": 8, "train_iters": 20, "train_samples": None, "lr_decay_iters": None, "lr_decay_samples": None,
    "lr_warmup_iters": 2, "lr_warmup_samples": 0, "lr_warmup_fraction": None, "lr": 1e-3, "min_lr": 1e-5,
    "lr_decay_style": "cosine", "weight_decay": 0.1,
}  # fmt: skip
NETWORKS: list[tuple[str, dict[str, Any]]] = [
    ("bigscience", {}),
    ("bigscience", {"bias_gelu_fusion": False, "attention_dropout": 0.0}),
    ("bigscience", {"gated_linear_unit": True, "activation_function": "gelu", "position_embedding_type": "alibi"}),
    ("deepspeedai", {"normalization": "RMSNorm", "num_query_groups": 2, "position_embedding_type": "none"}),
    ("deepspeedai", {"untie_embeddings_and_output_weights": True, "add_bias_linear": False}),
    ("classic", {"activation_function": "gelu_tanh", "add_bias_linear": False}),
    ("core", {"activation_function": "gelu"}),
    ("classic", {"activation_function": "squared_relu", "add_bias_linear": False, "add_qkv_bias": True}),
    (
        "core",
        {
            "gated_linear_unit": True, "activation_function": "quick_gelu", "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0, "add_bias_linear": False,
        },
    ),
    ("core", {"attention_output_gate": True, "num_query_groups": 2}),
    ("core", {"attention_window": 8, "qk_layernorm": True, "apply_layernorm_1p": True}),
    ("core", {"position_embedding_type": "rope", "rope_scaling_type": "linear", "rope_scaling_factor": 4.0}),
    (
        "core",
        {
            "position_embedding_type": "rope", "rope_scaling_type": "llama3", "rope_scaling_factor": 32.0,
            "rope_high_freq_factor": 4.0, "rope_original_max_positions": 8192,
        },
    ),
]  # fmt: skip


def arguments(naming: str, config: ModelConfig) -> dict[str, Any]:
    return stored_arguments(config, RUN, PROGRESS, naming, tensor_ranks=2, stages=1)


@pytest.mark.parametrize(("naming", "changes"), NETWORKS)
def test_the_importer_reads_the_same_network(naming: str, changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    found = arguments(naming, config)
    read = model_config(found, config.vocab_size, rotary_is_sound=True, is_core=naming == "core")
    same = dataclasses.replace(config, padded_vocab_size=config.vocab_size, bias_gelu_fusion=True)
    assert dataclasses.replace(read, bias_gelu_fusion=True, openai_gelu=False) == same
    assert (found["consumed_train_samples"], found["tensor_model_parallel_size"], found["lr"]) == (32, 2, 1e-3)


@pytest.mark.parametrize(
    ("naming", "changes", "sentence"),
    [
        ("bigscience", {"activation_function": "relu"}, "activation_function relu would be read as gelu"),
        ("bigscience", {"num_query_groups": 2}, "num_query_groups 2 would be read as 4"),
        ("core", {"norm_placement": "sandwich"}, "norm_placement sandwich would be read as pre"),
        (
            "core",
            {"activation_function": "gelu_tanh", "add_bias_linear": False},
            "activation_function gelu_tanh would be read as gelu",
        ),
        (
            "deepspeedai",
            {"activation_function": "silu", "gated_linear_unit": True, "glu_linear_offset": 1.0},
            "glu_linear_offset 1.0 would be read as 0.0",
        ),
        ("deepspeedai", {"attention_output_gate": True}, "attention_output_gate True would be read as False"),
        ("core", {"embed_layernorm": True}, "embed_layernorm True would be read as False"),
        ("core", {"position_embedding_type": "rope", "rope_scaling_type": "yarn"}, "rope_scaling_type yarn"),
        (
            "core",
            {"position_embedding_type": "rope", "multi_latent_attention": True},
            "multi_latent_attention True would be read as False",
        ),
    ],
)
def test_what_would_be_lost_is_named(naming: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConversionError, match=f"cannot be written with --naming {naming}: .*{sentence}"):
        arguments(naming, tiny_config(**changes))


def test_the_schedule_is_counted_in_samples() -> None:
    bigscience = scheduler_state(RUN, PROGRESS, "bigscience")
    assert (bigscience["warmup_steps"], bigscience["decay_steps"], bigscience["num_steps"]) == (16, 160, 32)
    by_samples = {**RUN, "train_samples": 400, "lr_warmup_samples": 40}
    assert scheduler_state(by_samples, PROGRESS, "classic")["lr_decay_steps"] == 400
    assert scheduler_state(by_samples, PROGRESS, "classic")["lr_warmup_steps"] == 40
    assert scheduler_state({**RUN, "lr_warmup_fraction": 0.25}, PROGRESS, "core")["lr_warmup_steps"] == 40
