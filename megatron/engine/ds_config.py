"""The DeepSpeed configuration: a pure function of the resolved configuration, merged with the user's own JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import RunConfig
from megatron.config.files.deepspeed_file import GOVERNED, read_deepspeed_file
from megatron.errors import ConfigError

# We log progress ourselves, and DeepSpeed has no setting for "never print".
_NEVER_PRINT_STEPS = 2**31 - 1

# Sections of a DeepSpeed file that this framework implements itself; values in them would be silently ignored.
_IMPLEMENTED_HERE = {
    "optimizer": "the optimizer is chosen by --optimizer, --lr, --weight-decay and the --adam-* flags",
    "scheduler": "the learning rate is a function of consumed samples (--lr-decay-style and the --lr-* flags)",
    "curriculum_learning": "sequence-length curricula are not supported",
    "data_efficiency": "the data order is fixed by the seed and the samples planned",
}

_ACCUMULATION_DTYPES = ("fp32", "bf16", "fp16")


def deepspeed_config(config: RunConfig) -> dict[str, Any]:
    """Builds the DeepSpeed dictionary of a resolved run.

    A `--deepspeed_config` file is merged over it. Settings that also have a flag were already reconciled by `parse`;
    only sections that this framework implements itself are left to reject.

    Raises:
        ConfigError: the file sets something that this framework implements itself, or has a plain value where an object
            belongs.
    """
    path = config.parallel.deepspeed_config
    if path is None:
        return _base(config)
    extra = read_deepspeed_file(path)
    problems = [
        f'--deepspeed_config {path}: "{key}" cannot be set here: {reason}. Remove it from the file.'
        for key, reason in _IMPLEMENTED_HERE.items()
        if _is_active(extra.get(key))
    ]
    problems += [
        *_accumulation_problems(config, extra),
        *_accumulation_dtype_problems(path, extra),
        *_recompute_problems(path, extra),
    ]
    base = _base(config)
    problems += [
        f'--deepspeed_config {path}: "{key}" is {extra[key]!r} there. It must be an object or be omitted.'
        for key, ours in base.items()
        if isinstance(ours, dict) and extra.get(key) not in ("auto", None) and not isinstance(extra[key], Mapping)
    ]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    merged = _merge(base, extra)
    for place in GOVERNED:
        _keep(merged, base, place)
    return merged


def _accumulation_dtype_problems(path: str, extra: Mapping[str, Any]) -> list[str]:
    """Checks the dtype in which gradients are to be accumulated."""
    section = extra.get("data_types")
    if section in ("auto", None):
        return []
    if not isinstance(section, Mapping):
        return [f'--deepspeed_config {path}: "data_types" is {section!r} there. It must be an object or be omitted.']
    dtype = section.get("grad_accum_dtype", "auto")
    if dtype in ("auto", None, *_ACCUMULATION_DTYPES):
        return []
    return [
        f'--deepspeed_config {path}: "data_types": "grad_accum_dtype" is {dtype!r} there. It must be one of '
        f"{', '.join(_ACCUMULATION_DTYPES)} or be omitted."
    ]


def _recompute_problems(path: str, extra: Mapping[str, Any]) -> list[str]:
    """Checks that DeepSpeed's pipeline engine is not asked to recompute; the layers do that themselves."""
    pipeline = extra.get("pipeline")
    interval = pipeline.get("activation_checkpoint_interval", 0) if isinstance(pipeline, Mapping) else 0
    if interval in (0, "auto", None):
        return []
    return [
        f'--deepspeed_config {path}: "pipeline": "activation_checkpoint_interval" is {interval!r} there, but the '
        "layers recompute themselves. Remove the entry and use --checkpoint-activations."
    ]


def _accumulation_problems(config: RunConfig, extra: Mapping[str, Any]) -> list[str]:
    """Checks that the gradient accumulation steps agree with the micro-batch and global batch sizes."""
    theirs = extra.get("gradient_accumulation_steps", "auto")
    samples_per_micro_step = config.optim.micro_batch_size * config.parallel.data_parallel_size
    ours = config.optim.global_batch_size // samples_per_micro_step
    if theirs in ("auto", None, ours):
        return []
    other_batch = (
        f" or change --global-batch-size to {theirs * samples_per_micro_step}"
        if type(theirs) is int and theirs > 0
        else ""
    )
    return [
        f'--deepspeed_config {config.parallel.deepspeed_config}: "gradient_accumulation_steps" is {theirs} there, but '
        f"a global batch of {config.optim.global_batch_size} in micro-batches of {config.optim.micro_batch_size} on "
        f"{config.parallel.data_parallel_size} data-parallel rank(s) gives {ours}. Remove the entry{other_batch}."
    ]


def _base(config: RunConfig) -> dict[str, Any]:
    optim, parallel, precision = config.optim, config.parallel, config.precision
    stage = parallel.effective_zero_stage
    settings: dict[str, Any] = {
        "train_batch_size": optim.global_batch_size,
        "train_micro_batch_size_per_gpu": optim.micro_batch_size,
        "gradient_clipping": optim.clip_grad,
        "steps_per_print": _NEVER_PRINT_STEPS,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }
    if precision.bf16:
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if precision.fp16:
        settings["fp16"] = {
            "enabled": True,
            "loss_scale": precision.loss_scale or 0,
            "initial_scale_power": max(0, round(precision.initial_loss_scale).bit_length() - 1),
            "loss_scale_window": int(precision.loss_scale_window),
            "hysteresis": precision.hysteresis,
            "min_loss_scale": precision.min_loss_scale,
        }
    return settings


def _merge(base: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with `extra` laid over it, objects merged key by key.

    "auto", null and the governed settings keep ours.
    """
    merged = dict(base)
    for key, value in extra.items():
        if value in ("auto", None) or key == "gradient_accumulation_steps":
            continue
        ours = merged.get(key)
        merged[key] = _merge(ours if isinstance(ours, dict) else {}, value) if isinstance(value, Mapping) else value
    return merged


def _keep(merged: dict[str, Any], base: Mapping[str, Any], place: tuple[str, ...]) -> None:
    """Restores our value of a setting that a flag governs; stage 0 in half precision, for example, runs as stage 1."""
    *path, last = place
    for key in path:
        merged, base = merged.get(key, {}), base.get(key, {})
    if last in base:
        merged[last] = base[last]


def _is_active(section: Any) -> bool:
    if isinstance(section, Mapping):
        return bool(section.get("enabled", True)) and bool(section)
    return section is not None
