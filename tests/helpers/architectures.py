"""Every switch of the architecture in a small network, and networks of these in any layout."""

from __future__ import annotations

from typing import Any

import torch

from megatron.config import ModelConfig
from megatron.engine.pipeline.chunks import stage_bounds
from megatron.model.gpt import gpt_layers
from megatron.model.interface.network import LayerStack
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.schedule.actions import Placement
from megatron.parallel.shard_spec import shard_spec_of
from tests.helpers.networks import SEED, tiny_config

WIDTH = 36
ROPE: dict[str, Any] = {"position_embedding_type": "rope"}
RMS: dict[str, Any] = {"normalization": "RMSNorm"}
QK_ALL: dict[str, Any] = {**ROPE, **RMS, "qk_layernorm": True, "qk_layernorm_scope": "all"}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {**ROPE, **RMS, "activation_function": "silu", "gated_linear_unit": True, "add_bias_linear": False,
              "num_query_groups": 3, "untie_embeddings_and_output_weights": True},
    "neox": {**ROPE, "rotary_percent": 0.5, "parallel_residual": True},
    "interleaved": {**ROPE, "rotary_interleaved": True, "num_query_groups": 2, "rope_layer_pattern": (1, 0)},
    "bloom": {"position_embedding_type": "alibi", "embed_layernorm": True},
    "multi-query": {"position_embedding_type": "none", "num_query_groups": 1, "activation_function": "relu"},
    "gemma": {**ROPE, **RMS, "apply_layernorm_1p": True, "norm_placement": "sandwich", "gated_linear_unit": True,
              "attention_window": 5, "attention_window_pattern": (1, 0), "rotary_base_windowed": 100.0,
              "attention_logit_softcap": 2.0, "output_logit_softcap": 1.0, "embedding_multiplier": 6.0,
              "qk_layernorm": True, "num_query_groups": 2},
    "gpt-oss": {**ROPE, **RMS, "softmax_type": "learnable", "attention_window": 5, "attention_window_pattern": (1, 0),
                "num_query_groups": 3, "rope_scaling_type": "yarn", "rope_original_max_positions": 8,
                "yarn_correction_range_round_to_int": False, "gated_linear_unit": True,
                "activation_function": "quick_gelu", "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0,
                "num_experts": 6, "moe_ffn_hidden_size": 18, "moe_mlp_bias": True, "moe_router_bias": True},
    "off by one": {"softmax_type": "off-by-one", "num_query_groups": 1, "position_embedding_type": "alibi"},
    "qwen3-next": {**ROPE, **RMS, "apply_layernorm_1p": True, "rotary_percent": 0.5, "qk_layernorm": True,
                   "attention_output_gate": True, "num_query_groups": 3, "attention_output_bias": False},
    "gated multi-query": {"attention_output_gate": True, "num_query_groups": 1},
    "window": {"attention_window": 4, "position_embedding_type": "none"},
    "post-residual": {"apply_residual_connection_post_layernorm": True, "residual_multiplier": 0.5,
                      "logit_multiplier": 0.5},
    "olmo2": {**QK_ALL, "norm_placement": "post_branch", "num_query_groups": 3, "apply_layernorm_1p": True},
    "olmo2, two groups": {**QK_ALL, "norm_placement": "post_branch", "num_query_groups": 2},
    "qk layer norm": {**ROPE, "qk_layernorm": True, "num_query_groups": 1, "apply_layernorm_1p": True},
    "experts": {"num_experts": 4, "moe_layer_pattern": (0, 1), "moe_z_loss_coeff": 0.1},
    "latent attention": {**ROPE, "multi_latent_attention": True, "kv_lora_rank": 12, "qk_head_dim": 8,
                         "qk_pos_emb_head_dim": 4, "v_head_dim": 6, "attention_window": 9},
    "deepseek": {**ROPE, **RMS, "multi_latent_attention": True, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_head_dim": 8,
                 "qk_pos_emb_head_dim": 4, "v_head_dim": 10, "qk_layernorm": True, "rotary_interleaved": True,
                 "rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rope_original_max_positions": 8,
                 "mscale": 0.7, "mscale_all_dim": 1.3, "latent_layernorm_epsilon": 1e-3, "add_bias_linear": False,
                 "gated_linear_unit": True, "activation_function": "silu", "num_experts": 8, "moe_router_topk": 4,
                 "moe_layer_pattern": (0, 1), "moe_ffn_hidden_size": 12, "moe_router_num_groups": 4,
                 "moe_router_group_topk": 2, "moe_router_score_function": "sigmoid",
                 "moe_router_topk_scaling_factor": 2.5, "moe_router_enable_expert_bias": True,
                 "moe_shared_expert_intermediate_size": 12},
    "residual experts": {"num_experts": 8, "moe_expert_counts": (4, 8), "moe_residual": True, "moe_router_topk": 1,
                         "moe_router_pre_softmax": True, "moe_ffn_hidden_size": 12},
    "sigmoid and shared experts": {**ROPE, **RMS, "gated_linear_unit": True, "activation_function": "silu",
                                   "num_experts": 8, "moe_router_topk": 3, "moe_ffn_hidden_size": 12,
                                   "moe_shared_expert_intermediate_size": 24,
                                   "moe_router_score_function": "sigmoid"},
}  # fmt: skip


def config_of(changes: dict[str, Any]) -> ModelConfig:
    """Two blocks with six heads, which three ranks can share."""
    settings = {"hidden_size": WIDTH, "num_attention_heads": 6, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return tiny_config(132, **{**settings, **changes})


def build(changes: dict[str, Any], mesh: ParallelMesh | None = None) -> LayerStack:
    """This rank's part of the network, its norm weights and biases drawn at random, since at their initial values
    errors in them hide.
    """
    mesh = mesh or ParallelMesh.single()
    network = gpt_layers(config_of(changes), mesh)
    bounds = stage_bounds(network, Placement.loop(mesh.pp.size, 1))
    model = LayerStack(network[bounds[mesh.pp.rank] : bounds[mesh.pp.rank + 1]], seed=SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spec = shard_spec_of(parameter)
            if not spec.is_matrix:
                whole = torch.randn(spec.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3
                box = tuple(slice(first, last) for first, last in zip(spec.start, spec.stop, strict=True))
                parameter.add_(whole[box].reshape(parameter.shape))
    return model
