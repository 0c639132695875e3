"""What the stored arguments of a fork say: the network, flags of ours, and how far the run had come.

Source: bigscience and deepspeedai Megatron-DeepSpeed and NVIDIA Megatron-LM, `megatron/arguments.py` and
`megatron/training/arguments.py`; what each option means there is in `megatron/model/transformer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megatron.checkpoint.record import Progress
from megatron.config import ModelConfig
from megatron.config.architecture.norms import LAYER_NORM, RMS_NORM
from megatron.config.architecture.positions import ALIBI, LEARNED, NO_POSITIONS, ROPE
from megatron.convert.megatron_format.foreign_model import TrainingState
from megatron.convert.pickles.reader import ForeignObject
from megatron.errors import ConfigError, ConversionError

Fork = Literal["bigscience", "deepspeedai", "nvidia"]
Stored = Mapping[str, Any]

# Flags that mean the same there and here.
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

_BIGSCIENCE_POSITIONS = {1: ROPE, 2: LEARNED, 3: ALIBI, "rotary": ROPE, "absolute": LEARNED, "alibi": ALIBI}
_NVIDIA_POSITIONS = {"learned_absolute": LEARNED, "rope": ROPE, "none": NO_POSITIONS}
_GLU = {"geglu": "gelu", "reglu": "relu", "liglu": "linear", "swiglu": "silu"}
# Options of networks that ours is not, with the value that means "off".
_REFUSED: Mapping[str, Any] = {
    "multi_latent_attention": False,
    "hybrid_override_pattern": None,
    "mtp_num_layers": None,
    "qk_l2_norm": False,
    "quick_geglu": False,
    "heterogeneous_layers_config_path": None,
    "no_rope_freq": None,
    "bert_binary_head_only": False,
    "use_mup": False,
    "sandwich_norm": False,
}
_DECAYS = ("constant", "linear", "cosine")
_OPTIMIZERS = ("adam", "sgd")


def fork_of(stored: Stored) -> Fork:
    """Which program's arguments these are."""
    if "glu_activation" in stored or isinstance(stored.get("position_embedding_type"), ForeignObject):
        return "bigscience"
    own = ("num_key_value_heads", "ds_sequence_parallel_size", "deepspeed")
    return "deepspeedai" if any(name in stored for name in own) else "nvidia"


def model_config(
    stored: Stored, vocab_size: int, *, rotary_is_sound: bool = False, is_core: bool = False
) -> ModelConfig:
    """The network of a checkpoint.

    Args:
        vocab_size: tokens without padding.
        rotary_is_sound: that a deepspeedai checkpoint with rotary positions was trained before its rotation broke.
        is_core: that the tensors have megatron-core's names, so that its modules computed.

    Raises:
        ConversionError: an option is missing or describes another kind of network; names it and its value.
    """
    fork = fork_of(stored)
    _check(stored)
    fields: dict[str, Any] = {
        name: _needed(stored, name) for name in ("num_layers", "hidden_size", "num_attention_heads")
    }
    for name in ("ffn_hidden_size", "kv_channels", "init_method_std", "attention_dropout", "hidden_dropout"):
        if stored.get(name) is not None:
            fields[name] = stored[name]
    fields |= _positions(stored, fork, rotary_is_sound) | _norms(stored) | _attention(stored)
    fields |= _feed_forward(stored, fork, is_core)
    fields["max_position_embeddings"] = stored.get("max_position_embeddings") or _needed(stored, "seq_length")
    fields["untie_embeddings_and_output_weights"] = bool(stored.get("untie_embeddings_and_output_weights", False))
    try:
        return ModelConfig(**fields, vocab_size=vocab_size, padded_vocab_size=vocab_size)
    except ConfigError as failure:
        raise ConversionError(f"the stored arguments do not describe a network of ours: {failure}") from failure


def gate_is_last(stored: Stored) -> bool:
    """Whether gated matrices hold the gate in their second half."""
    return bool(stored.get("glu_activation"))


def training_flags(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of the run by field, those that it stored and that we have."""
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
    """How far the run had come.

    Args:
        content: the file that holds iteration and tokens.
        stored: its arguments.
        updates: updates that the optimizer counted; None where it counts none.
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
            "the same. If it was trained before, say so with --rotary-is-sound."
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
        kind = _BIGSCIENCE_POSITIONS.get(value) if isinstance(value, int | str) else None
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
    if stored.get("swiglu"):
        return fields | {"gated_linear_unit": True, "activation_function": "silu"}
    if stored.get("squared_relu"):
        return fields | {"activation_function": "squared_relu"}
    return fields | {"activation_function": "gelu_tanh" if _gelu_is_tanh(stored, fork, is_core) else "gelu"}


def _gelu_is_tanh(stored: Stored, fork: Fork, is_core: bool) -> bool:
    """Whether GELU is computed by its tanh approximation, as the fused kernel and OpenAI's form do, or exactly.

    The fused kernel needs a bias: without one, both newer programs turn it off. megatron-core knows no other form, and
    where nothing is stored about the fusion, as in checkpoints of programs that only use its modules, it is off.

    Source: megatron/core/transformer/mlp.py and megatron/legacy/model/transformer.py of Megatron-LM, ParallelMLP of
    the other two.
    """
    fusion = stored.get("bias_gelu_fusion", stored.get("bias_activation_fusion", not is_core))
    is_fused = bool(fusion and stored.get("add_bias_linear", True))
    if is_core:
        return is_fused
    if stored.get("openai_gelu"):
        return True
    return is_fused and (fork == "bigscience" or not stored.get("onnx_safe"))


def _attention(stored: Stored) -> dict[str, Any]:
    fields: dict[str, Any] = {"qk_layernorm": bool(stored.get("qk_layernorm", False))}
    groups = stored.get("num_query_groups") if stored.get("group_query_attention") else None
    groups = groups or stored.get("num_key_value_heads")
    if groups:
        fields["num_query_groups"] = groups
    if stored.get("add_qkv_bias"):
        fields["add_qkv_bias"] = True
    window = stored.get("window_size")
    if isinstance(window, tuple | list) and window:
        fields["attention_window"] = int(window[0]) + 1  # upstream does not count the token itself
    return fields


def _needed(stored: Stored, name: str) -> Any:
    value = stored.get(name)
    if type(value) is not int:
        raise ConversionError(
            f"the stored arguments have {name} = {_shown(value)}, which is not a whole number. They do not come from a "
            "Megatron run."
        )
    return value


def _shown(value: Any) -> str:
    return repr(value)[:60] if isinstance(value, int | float | str | bool) or value is None else type(value).__name__


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0
