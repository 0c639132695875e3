"""Converts the stored arguments of a fork from and to the network, flags and progress of a run.

Arguments to be written are read back, to check that they express the network.

Source: bigscience and deepspeedai Megatron-DeepSpeed and NVIDIA Megatron-LM, `megatron/arguments.py` and
`megatron/training/arguments.py`; `megatron/model/transformer.py` for the meaning of each option.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megatron.checkpoint.record import Progress
from megatron.config import ModelConfig
from megatron.config.architecture.norms import LAYER_NORM, RMS_NORM
from megatron.config.architecture.positions import ALIBI, LEARNED, NO_POSITIONS, ROPE
from megatron.config.flags.fields import MUST_MATCH, resume_rule
from megatron.config.rules.checking import checked_model
from megatron.config.run_sections import fields_of
from megatron.errors import ConfigError, ConversionError
from trident.convert.megatron_format.foreign_model import TrainingState
from trident.convert.megatron_format.names import BIGSCIENCE, CORE, DEEPSPEEDAI
from trident.convert.pickles.reader import ForeignObject

Fork = Literal["bigscience", "deepspeedai", "nvidia"]
Stored = Mapping[str, Any]

# Flags with the same meaning in all programs.
SAME_FLAGS = (
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_warmup_fraction",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
    "seed",
    "split",
    "eod_mask_loss",
    "reset_position_ids",
    "reset_attention_mask",
    "optimizer",
)
BY_SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples")
BY_STEPS = ("train_iters", "lr_decay_iters", "lr_warmup_iters")

# Fields of the network with the same meaning in all programs.
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
# Flags of the run that are written.
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
_BIGSCIENCE_POSITIONS = {"rotary": ROPE, "absolute": LEARNED, "alibi": ALIBI}
_NUMBERED_POSITIONS = {1: ROPE, 2: LEARNED, 3: ALIBI}
_NVIDIA_POSITIONS = {"learned_absolute": LEARNED, "rope": ROPE, "none": NO_POSITIONS}
_GLU = {"geglu": "gelu", "reglu": "relu", "liglu": "linear", "swiglu": "silu"}
_GATED = {"swiglu": "silu", "quick_geglu": "quick_gelu"}
_GATE_BOUNDS = ("glu_linear_offset", "activation_func_clamp_value")
# Unsupported options of networks, with the value that disables them.
_REFUSED: Mapping[str, Any] = {
    "multi_latent_attention": False,
    "hybrid_override_pattern": None,
    "mtp_num_layers": None,
    "qk_l2_norm": False,
    "heterogeneous_layers_config_path": None,
    "no_rope_freq": None,
    "bert_binary_head_only": False,
    "use_mup": False,
    "sandwich_norm": False,
    "softmax_type": "vanilla",
}
_DECAYS = ("constant", "linear", "cosine", "inverse-square-root")
_OPTIMIZERS = ("adam", "sgd")


def fork_of(stored: Stored) -> Fork:
    """The program that stored the arguments."""
    if "glu_activation" in stored or isinstance(stored.get("position_embedding_type"), ForeignObject):
        return "bigscience"
    specific = ("num_key_value_heads", "ds_sequence_parallel_size", "deepspeed")
    return "deepspeedai" if any(name in stored for name in specific) else "nvidia"


def model_config(
    stored: Stored, vocab_size: int, *, rotary_is_sound: bool = False, is_core: bool = False
) -> ModelConfig:
    """The network of a checkpoint.

    Args:
        vocab_size: tokens without padding.
        rotary_is_sound: a deepspeedai checkpoint was trained before its rotary embedding broke.
        is_core: the tensors have Megatron Core's names, and were computed by its modules.

    Raises:
        ConversionError: an option is missing or not supported; names it and its value.
    """
    fork = fork_of(stored)
    _check(stored)
    fields: dict[str, Any] = {
        name: _required(stored, name) for name in ("num_layers", "hidden_size", "num_attention_heads")
    }
    for name in ("ffn_hidden_size", "kv_channels", "init_method_std", "attention_dropout", "hidden_dropout"):
        if stored.get(name) is not None:
            fields[name] = stored[name]
    fields |= _positions(stored, fork, rotary_is_sound) | _norms(stored) | _attention(stored)
    fields |= _feed_forward(stored, fork, is_core)
    fields["max_position_embeddings"] = stored.get("max_position_embeddings") or _required(stored, "seq_length")
    fields["untie_embeddings_and_output_weights"] = bool(stored.get("untie_embeddings_and_output_weights", False))
    try:
        return checked_model(ModelConfig(**fields, vocab_size=vocab_size, padded_vocab_size=vocab_size))
    except ConfigError as failure:
        raise ConversionError(f"the stored arguments do not describe a network of ours: {failure}") from failure


def gate_is_last(stored: Stored) -> bool:
    """True if the gate is the second half of gated matrices."""
    return bool(stored.get("glu_activation"))


def training_flags(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The stored flags of the run that exist here, by field."""
    counted = BY_SAMPLES if stored.get("train_samples") else BY_STEPS
    flags = {
        name: stored[name]
        for name in (*SAME_FLAGS, *counted)
        if isinstance(stored.get(name), bool | int | float | str) and not (name in counted and not stored[name])
    }
    if flags.get("lr_decay_style") not in _DECAYS:
        flags.pop("lr_decay_style", None)
    if flags.get("optimizer") not in _OPTIMIZERS:
        flags.pop("optimizer", None)
    if flags.get("lr_warmup_fraction") == 0:
        del flags["lr_warmup_fraction"]
    ramp = stored.get("rampup_batch_size")
    if isinstance(ramp, list | tuple) and len(ramp) == 3:
        flags["rampup_batch_size"] = [int(number) for number in ramp]
    for name in ("fp16", "bf16"):
        if stored.get(name):
            flags[name] = True
    return flags


def training_state(
    content: Mapping[str, Any],
    stored: Mapping[str, Any],
    updates: int | None = None,
    loss_scale: Mapping[str, float] | None = None,
) -> TrainingState:
    """The progress of the run.

    Args:
        content: the file with iteration and tokens.
        stored: its arguments.
        updates: the optimizer's step counter, if any.
    """
    step = _count(content.get("iteration", content.get("total_iters", content.get("global_steps"))))
    samples = _count(stored.get("consumed_train_samples"))
    if not samples and step:
        samples = step * _count(stored.get("global_batch_size"))
    tokens = _count(content.get("tokens")) or samples * _count(stored.get("seq_length"))
    skipped = _count(content.get("skipped_steps"))
    progress = Progress(step, samples, tokens, skipped)
    return TrainingState(
        progress=progress,
        updates=max(0, step - skipped) if updates is None else updates,
        loss_scale=loss_scale or {} if stored.get("fp16") else {},
        flags=training_flags(stored),
    )


def stored_arguments(
    model: ModelConfig, run: Mapping[str, Any], progress: Progress, naming: str, *, tensor_ranks: int, stages: int
) -> dict[str, Any]:
    """The arguments of the program with this naming.

    Args:
        run: the configuration by field.

    Raises:
        ConversionError: the program cannot express the network; names the fields and their values.
    """
    has_tanh = model.activation_function == "gelu_tanh"  # the fused form requires a bias; otherwise OpenAI's form
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
    """The state of the learning rate schedule, counted in samples."""
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


def _check(stored: Stored) -> None:
    for name, off in _REFUSED.items():
        if stored.get(name, off) not in (off, None, False):
            raise ConversionError(
                f"the checkpoint was trained with {name} = {_shown(stored[name])}, which this program cannot express."
            )
    experts = stored.get("num_experts") or 1
    most = max(experts) if isinstance(experts, list | tuple) and experts else experts
    if most not in (None, 1) and most != ():
        raise ConversionError(
            f"the checkpoint has num_experts = {_shown(most)}; networks with experts are not converted from this "
            "format."
        )


def _positions(stored: Stored, fork: Fork, rotary_is_sound: bool) -> dict[str, Any]:
    kind = _position_kind(stored, fork)
    fields: dict[str, Any] = {"position_embedding_type": kind}
    if kind != ROPE:
        return fields
    if fork == "deepspeedai" and not rotary_is_sound and (stored.get("ds_sequence_parallel_size") or 1) == 1:
        raise ConversionError(
            "the checkpoint has use_rotary_position_embeddings of deepspeedai's fork, whose attention since December "
            "2024 rotates queries and keys by the cosine of the angle instead of the angle: no other program computes "
            "the same. If it was trained before, add --rotary-is-sound."
        )
    base = stored.get("rotary_base") or stored.get("rope_theta")
    if base:
        fields["rotary_base"] = float(base)
    if stored.get("rotary_percent"):
        fields["rotary_percent"] = float(stored["rotary_percent"])
    fields["rotary_interleaved"] = bool(stored.get("rotary_interleaved", False))
    if stored.get("rotary_seq_len_interpolation_factor") not in (None, 1):
        fields |= {
            "rope_scaling_type": "linear",
            "rope_scaling_factor": float(stored["rotary_seq_len_interpolation_factor"]),
        }
    if stored.get("use_rope_scaling"):
        fields |= {
            "rope_scaling_type": "llama3",
            "rope_scaling_factor": float(stored.get("rope_scaling_factor", 8.0)),
            "rope_low_freq_factor": 1.0,
            "rope_high_freq_factor": 4.0,
            "rope_original_max_positions": 8192,
        }
    return fields


def _position_kind(stored: Stored, fork: Fork) -> str:
    value = stored.get("position_embedding_type")
    if isinstance(value, ForeignObject):  # an enumeration
        value = value.arguments[0] if value.arguments else None
    if fork == "bigscience":
        kinds: Mapping[Any, str] = _NUMBERED_POSITIONS if isinstance(value, int) else _BIGSCIENCE_POSITIONS
        kind = kinds.get(value) if isinstance(value, int | str) else None
    elif fork == "nvidia":
        kind = _NVIDIA_POSITIONS.get(value) if isinstance(value, str) else LEARNED if value is None else None
    elif stored.get("use_rotary_position_embeddings"):
        kind = ROPE
    else:
        kind = LEARNED if stored.get("add_position_embedding", True) else NO_POSITIONS
    if fork == "nvidia" and stored.get("use_rotary_position_embeddings"):
        kind = ROPE
    if kind is None:
        raise ConversionError(
            f"the checkpoint has position_embedding_type = {_shown(value)}, which this program cannot express."
        )
    return kind


def _norms(stored: Stored) -> dict[str, Any]:
    given = str(stored.get("normalization") or LAYER_NORM).lower()
    kinds = {"layernorm": LAYER_NORM, "rmsnorm": RMS_NORM}
    if given not in kinds:
        raise ConversionError(f"the checkpoint has normalization = {given}, which this program cannot express.")
    ignores_1p = kinds[given] == RMS_NORM and fork_of(stored) == "deepspeedai"
    epsilon = stored.get("norm_epsilon") or stored.get("layernorm_epsilon") or 1e-5
    return {
        "normalization": kinds[given],
        "layernorm_epsilon": float(epsilon),
        "apply_layernorm_1p": bool(stored.get("apply_layernorm_1p", False)) and not ignores_1p,
        "embed_layernorm": bool(stored.get("embed_layernorm", False)),
        "apply_residual_connection_post_layernorm": bool(stored.get("apply_residual_connection_post_layernorm", False)),
    }


def _feed_forward(stored: Stored, fork: Fork, is_core: bool) -> dict[str, Any]:
    bias = stored.get("add_bias_linear", True)
    fields: dict[str, Any] = {"add_bias_linear": bool(bias)}
    glu = stored.get("glu_activation")
    if glu:
        if glu not in _GLU:
            raise ConversionError(f"the checkpoint has glu_activation = {_shown(glu)}; known are {', '.join(_GLU)}.")
        return fields | {"gated_linear_unit": True, "activation_function": _GLU[glu]}
    gated = next((function for name, function in _GATED.items() if stored.get(name)), None)
    if gated:
        bounds = {name: float(stored[name]) for name in _GATE_BOUNDS if stored.get(name)}
        return fields | {"gated_linear_unit": True, "activation_function": gated, **bounds}
    if stored.get("squared_relu"):
        return fields | {"activation_function": "squared_relu"}
    return fields | {"activation_function": "gelu_tanh" if _gelu_is_tanh(stored, fork, is_core) else "gelu"}


def _gelu_is_tanh(stored: Stored, fork: Fork, is_core: bool) -> bool:
    """True if GELU uses the tanh approximation, as in the fused kernel and OpenAI's form.

    Source: megatron/core/transformer/mlp.py and megatron/legacy/model/transformer.py of Megatron-LM, ParallelMLP of
    the other two.
    """
    # The fused kernel requires a bias: without one, both newer programs disable it. Megatron Core has no other tanh
    # form, and disables the fusion if it is not stored, as in checkpoints of programs that only use its modules.
    fusion = stored.get("bias_gelu_fusion", stored.get("bias_activation_fusion", not is_core))
    is_fused = bool(fusion and stored.get("add_bias_linear", True))
    if is_core:
        return is_fused
    if stored.get("openai_gelu"):
        return True
    return is_fused and (fork == "bigscience" or not stored.get("onnx_safe"))


def _attention(stored: Stored) -> dict[str, Any]:
    fields: dict[str, Any] = {name: bool(stored.get(name, False)) for name in ("qk_layernorm", "attention_output_gate")}
    groups = stored.get("num_query_groups") if stored.get("group_query_attention") else None
    groups = groups or stored.get("num_key_value_heads")
    if groups:
        fields["num_query_groups"] = groups
    if stored.get("add_qkv_bias"):
        fields["add_qkv_bias"] = True
    window = stored.get("window_size")
    if isinstance(window, tuple | list) and window:
        fields["attention_window"] = int(window[0]) + 1  # upstream excludes the token itself
    return fields


def _required(stored: Stored, name: str) -> Any:
    value = stored.get(name)
    if type(value) is not int:
        raise ConversionError(
            f"the stored arguments have {name} = {_shown(value)}, which is not an integer. They do not come from a "
            "Megatron run."
        )
    return value


def _shown(value: Any) -> str:
    return repr(value)[:60] if isinstance(value, int | float | str | bool) or value is None else type(value).__name__


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0


def _bigscience(model: ModelConfig) -> dict[str, Any]:
    glu = _name_of(model.activation_function, _GLU) if model.gated_linear_unit else None
    return {
        "deepspeed": True,
        "position_embedding_type": _name_of(model.position_embedding_type, _BIGSCIENCE_POSITIONS),
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
        "position_embedding_type": _name_of(model.position_embedding_type, _NVIDIA_POSITIONS)
        or model.position_embedding_type,
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
        "attention_output_gate": model.attention_output_gate,
        "quick_geglu": model.gated_linear_unit and model.activation_function == "quick_gelu",
        **{name: getattr(model, name) for name in _GATE_BOUNDS},
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
    """Checks that the arguments, read back, describe the same network."""
    read = model_config(arguments, model.vocab_size, rotary_is_sound=True, is_core=naming == CORE)
    lost = [
        f"{field.name} {getattr(model, field.name)} would be read as {getattr(read, field.name)}"
        for field in fields_of(ModelConfig)
        if resume_rule(field) == MUST_MATCH and getattr(model, field.name) != getattr(read, field.name)
    ]
    if lost:
        raise ConversionError(
            f"the network cannot be written with --naming {naming}: {'; '.join(lost)}. Another --naming may support "
            "it; tools/convert/export_hf.py writes more networks."
        )


def _whole(number: float) -> float | int:
    # Integers for flags that only accept integers.
    return int(number) if number == int(number) else number


def _name_of(ours: str, names: Mapping[str, str]) -> str | None:
    return next((theirs for theirs, value in names.items() if value == ours), None)
