"""The arguments of a run as other programs store them: what `megatron_format.arguments` reads, the other way round.

That a network can be expressed at all is checked by reading the arguments back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.record import Progress
from megatron.config import ModelConfig
from megatron.config.architecture.positions import ALIBI, LEARNED, NO_POSITIONS, ROPE
from megatron.config.flags.fields import MUST_MATCH, resume_rule
from megatron.config.run import fields_of
from megatron.convert.megatron_format.arguments import BY_SAMPLES, BY_STEPS, SAME_FLAGS, model_config
from megatron.convert.megatron_output.naming import BIGSCIENCE, CORE, DEEPSPEEDAI
from megatron.errors import ConversionError

# Fields that mean the same there and here.
_NETWORK = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "kv_channels",
    "ffn_hidden_size",
    "max_position_embeddings",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "apply_residual_connection_post_layernorm",
)
_RUN = (
    *SAME_FLAGS,
    *BY_SAMPLES,
    *BY_STEPS,
    "rampup_batch_size",
    "fp16",
    "bf16",
    "make_vocab_size_divisible_by",
    "tokenizer_type",
    "vocab_file",
    "merge_file",
)
_BIGSCIENCE_POSITIONS = {ROPE: "rotary", LEARNED: "absolute", ALIBI: "alibi"}
_NVIDIA_POSITIONS = {ROPE: "rope", LEARNED: "learned_absolute", NO_POSITIONS: "none"}
_GLU = {"gelu": "geglu", "relu": "reglu", "linear": "liglu", "silu": "swiglu"}


def stored_arguments(
    model: ModelConfig, run: Mapping[str, Any], progress: Progress, naming: str, *, tensor_ranks: int, stages: int
) -> dict[str, Any]:
    """The arguments of the program whose naming it is.

    Args:
        run: our configuration by field.

    Raises:
        ConversionError: the program cannot express the network; names the fields and their values.
    """
    has_tanh = model.activation_function == "gelu_tanh"  # the fused form, which needs a bias; else OpenAI's
    arguments: dict[str, Any] = {name: getattr(model, name) for name in _NETWORK}
    arguments |= {"bias_gelu_fusion": has_tanh and model.add_bias_linear}
    arguments |= {"openai_gelu": has_tanh and not model.add_bias_linear and naming != CORE}
    forms = {BIGSCIENCE: _bigscience, DEEPSPEEDAI: _deepspeedai}
    arguments |= forms.get(naming, _nvidia)(model)
    _check_expressed(model, arguments, naming)
    return {
        **{name: run[name] for name in _RUN if name in run},
        **arguments,
        "tensor_model_parallel_size": tensor_ranks,
        "pipeline_model_parallel_size": stages,
        "padded_vocab_size": model.padded_vocab_size,
        "iteration": progress.step,
        "consumed_train_samples": progress.consumed_samples,
        "consumed_train_tokens": progress.consumed_tokens,
        "consumed_valid_samples": 0,
    }


def scheduler_state(run: Mapping[str, Any], progress: Progress, naming: str) -> dict[str, Any]:
    """The state of the learning-rate schedule, which the other programs count in samples."""
    batch = run["global_batch_size"]
    if run.get("train_samples") is not None:
        decay = run.get("lr_decay_samples") or run["train_samples"]
        warmup = run.get("lr_warmup_samples") or 0
    else:
        decay = (run.get("lr_decay_iters") or run["train_iters"]) * batch
        warmup = (run.get("lr_warmup_iters") or 0) * batch
    if run.get("lr_warmup_fraction"):
        warmup = run["lr_warmup_fraction"] * decay
    counted = {"max_lr": run["lr"], "min_lr": run["min_lr"], "num_steps": progress.consumed_samples}
    style, decay_rate = run["lr_decay_style"], run["weight_decay"]
    if naming == BIGSCIENCE:
        tokens = {"warmup_tokens": None, "num_tokens": progress.consumed_tokens}
        return {**counted, **tokens, "warmup_steps": warmup, "decay_style": style, "decay_steps": decay}
    return {
        **counted,
        "lr_warmup_steps": warmup,
        "lr_decay_style": style,
        "lr_decay_steps": decay,
        "start_wd": decay_rate,
        "end_wd": decay_rate,
        "wd_incr_style": "constant",
        "wd_incr_steps": decay,
    }


def _bigscience(model: ModelConfig) -> dict[str, Any]:
    glu = _GLU.get(model.activation_function) if model.gated_linear_unit else None
    return {
        "deepspeed": True,
        "position_embedding_type": _BIGSCIENCE_POSITIONS.get(model.position_embedding_type),
        "glu_activation": glu,
        "layernorm_epsilon": model.layernorm_epsilon,
        "embed_layernorm": model.embed_layernorm,
    }


def _deepspeedai(model: ModelConfig) -> dict[str, Any]:
    is_rotary = model.position_embedding_type == ROPE
    return {
        "deepspeed": True,
        "use_rotary_position_embeddings": is_rotary,
        "add_position_embedding": model.position_embedding_type == LEARNED,
        "rope_theta": _whole(model.rotary_base),
        "rotary_percent": model.rotary_percent,
        "normalization": model.normalization.lower(),
        "layernorm_epsilon": model.layernorm_epsilon,
        "apply_layernorm_1p": model.apply_layernorm_1p,
        "num_key_value_heads": model.num_query_groups,
        **_newer_feed_forward(model),
    }


def _nvidia(model: ModelConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "transformer_impl": "local",
        "position_embedding_type": _NVIDIA_POSITIONS.get(model.position_embedding_type, model.position_embedding_type),
        "rotary_base": _whole(model.rotary_base),
        "rotary_percent": model.rotary_percent,
        "rotary_interleaved": model.rotary_interleaved,
        "normalization": model.normalization,
        "norm_epsilon": model.layernorm_epsilon,
        "layernorm_epsilon": model.layernorm_epsilon,
        "apply_layernorm_1p": model.apply_layernorm_1p,
        "group_query_attention": model.num_query_groups != model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "add_qkv_bias": model.add_qkv_bias and not model.add_bias_linear,
        "qk_layernorm": model.qk_layernorm,
        **_newer_feed_forward(model),
    }
    if model.attention_window is not None:
        fields["window_size"] = (model.attention_window - 1, 0)  # without the token itself
    if model.uses_rope and model.rope_scaling_type == "linear":
        fields["rotary_seq_len_interpolation_factor"] = model.rope_scaling_factor
    if model.uses_rope and model.rope_scaling_type == "llama3":
        fields |= {"use_rope_scaling": True, "rope_scaling_factor": model.rope_scaling_factor}
    return fields


def _newer_feed_forward(model: ModelConfig) -> dict[str, Any]:
    return {
        "swiglu": model.gated_linear_unit and model.activation_function == "silu",
        "squared_relu": model.activation_function == "squared_relu",
        "add_bias_linear": model.add_bias_linear,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
    }


def _check_expressed(model: ModelConfig, arguments: Mapping[str, Any], naming: str) -> None:
    """Reads the arguments back; a network that is not the same cannot be expressed by them."""
    read = model_config(arguments, model.vocab_size, rotary_is_sound=True, is_core=naming == CORE)
    lost = [
        f"{field.name} {getattr(model, field.name)} would be read as {getattr(read, field.name)}"
        for field in fields_of(ModelConfig)
        if resume_rule(field) == MUST_MATCH and getattr(model, field.name) != getattr(read, field.name)
    ]
    if lost:
        raise ConversionError(
            f"the network cannot be written with --naming {naming}: {'; '.join(lost)}. Another --naming may have words "
            "for it; tools/convert/export_hf.py writes more networks."
        )


def _whole(number: float) -> float | int:
    """A number whose flag takes whole numbers there, where it is one."""
    return int(number) if number == int(number) else number
