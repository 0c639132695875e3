"""Flags of published scripts that stand for values of other fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config.flags.shorthands import expand_shorthands, shorthand_flags
from megatron.errors import ConfigError
from tests.config.command_lines import small

SWIGLU = {"activation_function": "silu", "gated_linear_unit": True}
ROPE = {"position_embedding_type": "rope"}
LATENT = "--multi-latent-attention --position-embedding-type rope"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("--swiglu", {**SWIGLU, "ffn_hidden_size": 128}),  # 64 // 24 * 64
        ("--swiglu --hidden-size 4096", {"ffn_hidden_size": 10880}),
        ("--swiglu --ffn-hidden-size 200", {**SWIGLU, "ffn_hidden_size": 200}),
        ("--swiglu false", {"activation_function": "gelu_tanh", "gated_linear_unit": False, "ffn_hidden_size": 256}),
        ("--glu-activation swiglu", {**SWIGLU, "ffn_hidden_size": 256}),
        ("--glu-activation geglu", {"activation_function": "gelu", "gated_linear_unit": True}),
        ("--glu-activation reglu --no-bias-gelu-fusion", {"activation_function": "relu", "gated_linear_unit": True}),
        ("--glu-activation liglu", {"activation_function": "linear", "gated_linear_unit": True}),
        ("--squared-relu", {"activation_function": "squared_relu", "gated_linear_unit": False}),
        ("--use-rotary-position-embeddings", ROPE),
        ("--use-rotary-position-embeddings --no-position-embedding", ROPE),
        ("--no-position-embedding --position-embedding-type rope", ROPE),
        ("--no-position-embedding", {"position_embedding_type": "none"}),
        (
            "--use-rotary-position-embeddings --use-rope-scaling --rope-scaling-factor 32",
            {**ROPE, "rope_scaling_type": "llama3", "rope_scaling_factor": 32.0, "rope_low_freq_factor": 1.0,
             "rope_high_freq_factor": 4.0, "rope_original_max_positions": 8192},
        ),
        (
            "--position-embedding-type rope --use-rope-scaling --rope-original-max-positions 4096",
            {"rope_original_max_positions": 4096},
        ),
        (
            "--position-embedding-type rope --rotary-seq-len-interpolation-factor 4",
            {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0},
        ),
        ("--group-query-attention --num-query-groups 2", {"num_query_groups": 2}),
        ("--group-query-attention", {"num_query_groups": 1}),
        ("--num-query-groups 2", {"num_query_groups": 2}),
        (
            "--disable-bias-linear",
            {"add_bias_linear": False, "add_qkv_bias": False, "mlp_bias": False, "activation_function": "gelu"},
        ),
        ("--disable-bias-linear --add-qkv-bias", {"add_qkv_bias": True, "attention_output_bias": False}),
        ("--disable-bias-linear --openai-gelu", {"activation_function": "gelu_tanh"}),
        ("--window-size 15,0", {"attention_window": 16}),
        ("--window-size '(15, 0)'", {"attention_window": 16}),
        ("--window-size 15 0 --window-attn-skip-freq 2", {"attention_window": 16, "attention_window_pattern": (1, 0)}),
        ("--window-size 1,0 --window-attn-skip-freq [1,0,0,0]", {"attention_window_pattern": (1, 0, 0, 0)}),
        ("--window-size (-1,0)", {"attention_window": None}),
        ("--use-rotary-position-embeddings --no-rope-freq 4", {"rope_layer_pattern": (1, 1, 1, 0)}),
        ("--use-rotary-position-embeddings --no-rope-freq [1,0]*2", {"rope_layer_pattern": (0, 1)}),
        ("--num-experts 4 --moe-layer-freq 2", {"moe_layer_pattern": (1, 0)}),
        ("--num-experts 4 --moe-layer-freq 1", {"moe_layer_pattern": ()}),
        ("--num-experts 4 --moe-layer-freq [0]*1+[1]*3", {"moe_layer_pattern": (0, 1, 1, 1)}),
        ("--num-experts 4 4 --expert-interval 2", {"num_experts": 4, "moe_layer_pattern": (0, 1)}),
        (f"{LATENT} --rotary-scaling-factor 40",
         {"rope_scaling_type": "yarn", "rope_scaling_factor": 40.0, "rope_original_max_positions": 4096}),
        (f"{LATENT} --rope-type yarn --yarn-beta-fast 16",
         {"rope_scaling_type": "yarn", "rope_scaling_factor": 1.0, "rope_original_max_positions": 4096,
          "rope_beta_fast": 16.0}),
        (LATENT, {"rope_scaling_type": "none"}),
        ("--num-experts 4 --topk 1", {"moe_router_topk": 1, "moe_router_pre_softmax": True}),
        ("--num-experts 4 --topk 2", {"moe_router_topk": 2, "moe_router_pre_softmax": False}),
        ("--num-experts 1 --topk 1", {"moe_router_topk": 1, "moe_router_pre_softmax": False}),
        ("--num-experts 4 --moe-router-load-balancing-type none", {"moe_aux_loss_coeff": 0.0}),
        ("--num-experts 4 --moe-router-load-balancing-type aux_loss", {"moe_aux_loss_coeff": 0.01}),
    ],
)  # fmt: skip
def test_what_they_stand_for(text: str, values: dict[str, Any]) -> None:
    config = small(text)
    assert {name: getattr(config.model, name) for name in values} == values
    assert config.notices == ()


@pytest.mark.parametrize("text", ["--position-embedding-type rope", f"{LATENT} --rope-type rope"])
def test_a_factor_without_a_scaling_is_announced(text: str) -> None:
    config = small(f"{text} --rotary-scaling-factor 40")
    assert config.model.rope_scaling_type == "none"
    assert any("--rope-scaling-factor 40.0 has no effect" in notice for notice in config.notices)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--rope-type neox", "--rope-type neox is unknown. Use one of: rope, yarn"),
        (
            "--swiglu --activation-function relu",
            "--swiglu cannot be combined with --activation-function relu: .* silu",
        ),
        ("--swiglu --no-gated-linear-unit", "--swiglu cannot be combined with --gated-linear-unit off"),
        ("--swiglu --glu-activation geglu", "--glu-activation cannot be combined with --swiglu"),
        ("--squared-relu --swiglu", "--squared-relu cannot be combined with --swiglu"),
        (
            "--disable-bias-linear --add-bias-linear",
            "--disable-bias-linear cannot be combined with --add-bias-linear on",
        ),
        (
            "--use-rotary-position-embeddings --position-embedding-type learned_absolute",
            "--use-rotary-position-embeddings cannot be combined with --position-embedding-type learned_absolute",
        ),
        (
            "--no-position-embedding --position-embedding-type absolute",
            "--no-position-embedding cannot be combined with --position-embedding-type learned_absolute",
        ),
        (
            "--position-embedding-type rope --use-rope-scaling --rope-scaling-type yarn",
            "--use-rope-scaling cannot be combined with --rope-scaling-type yarn",
        ),
        ("--glu-activation gelu", "--glu-activation gelu is unknown. Use one of: geglu, reglu"),
        ("--window-size 15", "--window-size 15 is not a causal window"),
        ("--window-size 15,3", "--window-size 15,3 is not a causal window"),
        ("--window-size a,0", "--window-size a,0 is not a causal window"),
        ("--moe-layer-freq [1,0]", r"--moe-layer-freq \[1,0\] has 2 entries, but --num-layers is 4"),
        ("--expert-interval 0", "--expert-interval 0 is not a layer pattern"),
        (
            "--moe-router-load-balancing-type sinkhorn",
            "--moe-router-load-balancing-type sinkhorn is not supported: it assigns",
        ),
        ("--num-experts 4 4 4", "--num-experts 4 4 4 has 3 values, but 4 of 4 layers are MoE layers"),
        ("--num-experts 4 8 4", "--num-experts 4 8 4 has 3 values, but 4 of 4 layers are MoE layers"),
        ("--mock-data --data-path d", "--mock-data cannot be combined with --data-path d: it sets --data-path mock:"),
        ("--num-experts 4 --mlp-type wide", "--mlp-type wide is unknown. Use one of: standard, residual"),
    ],
)
def test_contradictions_and_wrong_values(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        small(text)
    assert len(caught.value.problems) == 1, caught.value.problems


def test_a_file_may_hold_them_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"swiglu": True, "use-rotary-position-embeddings": True}))
    config = small(f"--config {path}")
    assert (config.model.activation_function, config.model.ffn_hidden_size) == ("silu", 128)
    assert config.provenance["model.activation_function"] == config.provenance["model.ffn_hidden_size"] == "file"
    config = small(f"--config {path} --squared-relu --no-gated-linear-unit")
    assert (config.model.activation_function, config.model.gated_linear_unit) == ("squared_relu", False)
    assert config.provenance["model.activation_function"] == "given"


def test_a_width_of_a_weaker_layer_holds() -> None:
    (weak, strong), problems = expand_shorthands(
        [{"model.ffn_hidden_size": 77, "model.hidden_size": 48}, {"shorthand.swiglu": True}]
    )
    assert problems == [] and weak["model.ffn_hidden_size"] == 77
    assert strong == {"model.activation_function": "silu", "model.gated_linear_unit": True}


def test_a_tool_asks_only_for_what_a_flag_says() -> None:
    layers = [{"shorthand.swiglu": True, "model.hidden_size": 48}]
    (found,), _ = expand_shorthands(layers, with_defaults=False)
    assert "model.ffn_hidden_size" not in found and found["model.gated_linear_unit"]


def test_every_shorthand_is_shown_in_the_help() -> None:
    for entry in shorthand_flags().values():
        assert entry.flag.facts.help and not entry.flag.required


def test_flags_of_experts_on_a_run_without_experts() -> None:
    text = "--num-experts 1 --moe-loss-coeff 0.1 --topk 1 --moe-min-capacity 4 --moe-train-capacity-factor 1.0 "
    config = small(text + "--mlp-type standard --moe-expert-parallel-size 1 --moe-eval-capacity-factor 1")
    assert config.model.num_experts == 1 and config.notices == ()
