"""Tiny models of every Hugging Face family, with random values in every tensor, written as `transformers` writes them.

`transformers` initializes norms to one and biases to zero, which hides mistakes: on such a model a dropped bias or a
wrong GELU changes the logits by less than rounding. So every vector is random here, and the matrices are large enough
for attention to be far from uniform.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.helpers.vocabulary import trained_vocabulary

TOKENS = 280  # of the tokenizer; not a multiple of 128
END = TOKENS - 1  # the token that ends documents
LENGTH = 30  # tokens: longer than every window and every original context below
WINDOW = 7
CONTEXT = 16  # original context of the scaled rotary positions

ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")  # their name and ours

LLAMA = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TinyModel:
    """A configuration of a family.

    Attributes:
        fields: what differs from the defaults of the `transformers` configuration class.
        vocabulary_rows: rows of the embedding; more than the tokenizer's tokens where a family pads them.
    """

    model_type: str
    fields: Mapping[str, Any]
    vocabulary_rows: int = TOKENS


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def _longrope(original: int) -> dict[str, Any]:
    pairs = 6  # half of 3/4 of the 16 channels of a head
    return {
        "hidden_size": 64,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": 0.75,
        **_rope(
            "longrope",
            partial_rotary_factor=0.75,
            short_factor=[1.0 + 0.1 * pair for pair in range(pairs)],
            long_factor=[1.5 + 0.7 * pair for pair in range(pairs)],
        ),
    }


GPT_NEOX = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
BLOOM = {"n_layer": 3}
GEMMA = {**LLAMA, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
EXPERTS = {**LLAMA, "intermediate_size": 40}
QWEN_EXPERTS = {
    **LLAMA, "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3,
}  # fmt: skip
DEEPSEEK = {
    **LLAMA, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6, "v_head_dim": 10, "moe_intermediate_size": 24, "n_routed_experts": 12,
    "n_shared_experts": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
}  # fmt: skip

TINY_MODELS: Mapping[str, TinyModel] = {
    "gpt2": TinyModel("gpt2", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "gpt2-inner": TinyModel(
        "gpt2",
        {
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 64,
            "n_inner": 80,
            "activation_function": "relu",
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "neox-parallel": TinyModel(
        "gpt_neox", {**GPT_NEOX, "hidden_size": 64, **_rope("default", partial_rotary_factor=0.25)}, 300
    ),
    "neox-sequential": TinyModel(
        "gpt_neox", {**GPT_NEOX, "use_parallel_residual": False, **_rope("default", partial_rotary_factor=1.0)}
    ),
    "bloom-8": TinyModel("bloom", {**BLOOM, "hidden_size": 64, "n_head": 8}),
    "bloom-12": TinyModel("bloom", {**BLOOM, "hidden_size": 96, "n_head": 12}),
    "bloom-7": TinyModel("bloom", {**BLOOM, "hidden_size": 56, "n_head": 7}),
    "bloom-residual-after-norm": TinyModel(
        "bloom", {**BLOOM, "hidden_size": 64, "n_head": 8, "apply_residual_connection_post_layernorm": True}
    ),
    "llama": TinyModel("llama", {**LLAMA, "num_key_value_heads": 4}),
    "llama-grouped-llama3": TinyModel(
        "llama",
        {
            **LLAMA,
            **_rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=CONTEXT,
            ),
        },
    ),
    "llama-multi-query-linear": TinyModel(
        "llama", {**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True, **_rope("linear", factor=4.0)}
    ),
    "llama-dynamic": TinyModel("llama", {**LLAMA, "max_position_embeddings": CONTEXT, **_rope("dynamic", factor=4.0)}),
    "llama-yarn": TinyModel(
        "llama", {**LLAMA, **_rope("yarn", rope_theta=20.0, factor=4.0, original_max_position_embeddings=CONTEXT)}
    ),
    "llama-biases": TinyModel(
        "llama",
        {
            **LLAMA,
            "head_dim": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "mistral": TinyModel("mistral", {**LLAMA, "sliding_window": WINDOW, "rms_norm_eps": 1e-3}),
    "qwen2": TinyModel("qwen2", LLAMA, 304),
    "qwen2-window": TinyModel(
        "qwen2",
        {**LLAMA, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": TinyModel("qwen3", {**LLAMA, "head_dim": 20, "tie_word_embeddings": True}, 304),
    "gemma2": TinyModel("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": TinyModel(
        "gemma3_text",
        {
            **GEMMA,
            "num_hidden_layers": 6,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmo2": TinyModel("olmo2", LLAMA),
    "olmo3": TinyModel(
        "olmo3",
        {
            **LLAMA,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 20.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": CONTEXT,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
        },
    ),
    "smollm3": TinyModel("smollm3", {**LLAMA, "num_hidden_layers": 4, "no_rope_layer_interval": 2, **_rope("default")}),
    "granite": TinyModel(
        "granite",
        {
            **LLAMA,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.17,
            "logits_scaling": 7.0,
        },
    ),
    "phi3": TinyModel("phi3", {**LLAMA, "sliding_window": WINDOW, "original_max_position_embeddings": 64}),
    "phi3-short": TinyModel("phi3", {**LLAMA, **_longrope(48)}),
    "phi3-long": TinyModel("phi3", {**LLAMA, **_longrope(CONTEXT)}),
    "mixtral": TinyModel("mixtral", {**EXPERTS, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3-moe": TinyModel("qwen3_moe", {**QWEN_EXPERTS, "norm_topk_prob": True}, 304),
    "gpt-oss": TinyModel(
        "gpt_oss",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": WINDOW,
            "swiglu_limit": 0.6,
            **_rope("yarn", rope_theta=20.0, factor=4.0, original_max_position_embeddings=CONTEXT, truncate=False),
        },
    ),
    "qwen3-moe-plain": TinyModel("qwen3_moe", {**QWEN_EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "deepseek-v2": TinyModel(
        "deepseek_v2",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
        },
    ),
    "deepseek-v3": TinyModel(
        "deepseek_v3",
        {
            **DEEPSEEK,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            **_rope(
                "yarn",
                rope_theta=20.0,
                factor=4.0,
                original_max_position_embeddings=CONTEXT,
                mscale=0.7,
                mscale_all_dim=1.3,
            ),
        },
    ),
    "deepseek-v3-halves": TinyModel(
        "deepseek_v3",
        {
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "first_k_dense_replace": 0,
            "n_shared_experts": 1,
        },
    ),
}


def build_tiny_model(name: str) -> PreTrainedModel:
    """The model with its random values, in float32 and evaluation mode, always the same for a name."""
    tiny = TINY_MODELS[name]
    end = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": None}
    config = CONFIG_MAPPING[tiny.model_type](**tiny.fields, **end, vocab_size=tiny.vocabulary_rows)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomize(model, zlib.crc32(name.encode()))
    return model


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draws all values of a model, those of routers' biases too: matrices around 0, and vectors around their initial
    value.
    """
    generator = torch.Generator().manual_seed(seed)
    biases = [values for name, values in model.named_buffers() if name.endswith(ROUTER_BIASES)]
    with torch.no_grad():
        for parameter in (*model.parameters(), *biases):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(0.15 * noise)
            else:
                parameter.add_(0.3 * noise)


def write_tiny_model(name: str, folder: Path) -> Path:
    """Writes a model with its tokenizer into a folder, as a download from the hub would lie there."""
    model = build_tiny_model(name)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, tokens: int = TOKENS) -> None:
    """Writes a byte-level BPE as `tokenizer.json`."""
    vocabulary, merges = trained_vocabulary(tokens)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": vocabulary["<|endoftext|>"], "content": "<|endoftext|>", "special": True, "single_word": False,
           "lstrip": False, "rstrip": False, "normalized": False}  # fmt: skip
    described = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": byte_level, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary,
            "merges": [" ".join(pair) for pair in merges],
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def sample_tokens(rows: int = 2, length: int = LENGTH, seed: int = 5) -> torch.Tensor:
    """Random tokens of the tokenizer.

    Shapes: `[rows, length]` int64.
    """
    return torch.randint(0, TOKENS, (rows, length), generator=torch.Generator().manual_seed(seed))
