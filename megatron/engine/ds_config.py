"""What DeepSpeed is told: a pure function of the resolved configuration, merged with the user's own JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config import RunConfig
from megatron.errors import ConfigError

# DeepSpeed's own progress lines are replaced by ours; it has no switch for "never".
_NEVER_PRINT_STEPS = 2**31 - 1

# JSON path -> (configuration area, field): these flags and the file may not disagree.
_SHARED_SETTINGS: dict[tuple[str, ...], tuple[str, str]] = {
    ("train_micro_batch_size_per_gpu",): ("optim", "micro_batch_size"),
    ("train_batch_size",): ("optim", "global_batch_size"),
    ("gradient_clipping",): ("optim", "clip_grad"),
    ("zero_optimization", "stage"): ("parallel", "zero_stage"),
    ("fp16", "enabled"): ("model", "fp16"),
    ("bf16", "enabled"): ("model", "bf16"),
    ("fp16", "initial_scale_power"): ("optim", "initial_loss_scale"),
    ("fp16", "loss_scale_window"): ("optim", "loss_scale_window"),
    ("fp16", "min_loss_scale"): ("optim", "min_loss_scale"),
    ("fp16", "hysteresis"): ("optim", "hysteresis"),
    ("fp16", "loss_scale"): ("optim", "loss_scale"),
}

# Parts of a DeepSpeed file that this framework does itself; a file that sets them would be silently overruled.
_OWN_BUSINESS = {
    "optimizer": "the optimizer is chosen by --optimizer, --lr, --weight-decay and the --adam-* flags",
    "scheduler": "the learning rate is a function of consumed samples (--lr-decay-style and the --lr-* flags)",
    "curriculum_learning": "sequence-length curricula are not supported",
    "data_efficiency": "the data order is fixed by the seed and the samples planned",
}


def deepspeed_config(config: RunConfig) -> dict[str, Any]:
    """Builds the DeepSpeed dictionary of a resolved run.

    A `--deepspeed_config` file is merged over it; where the file names a setting that a flag governs, the flag wins if it was
    given with the same value, the file wins if the flag was left at its default (see `apply_deepspeed_file`).

    Raises:
        ConfigError: the file sets something that belongs to a flag or is done here.
    """
    base = _base(config)
    if config.parallel.deepspeed_config is None:
        return base
    extra = read_deepspeed_file(config.parallel.deepspeed_config)
    problems = [f"--deepspeed_config {config.parallel.deepspeed_config}: {conflict}" for conflict in conflicts(config, extra)]
    if problems:
        raise ConfigError(problems)
    return _merge(base, extra)


def read_deepspeed_file(path: str) -> dict[str, Any]:
    """Reads a DeepSpeed JSON file.

    Raises:
        ConfigError: it is missing, not JSON, or not an object.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as failure:
        raise ConfigError(f"--deepspeed_config {path} cannot be read: {failure.strerror}. Give a readable JSON file.") from failure
    except ValueError as failure:
        raise ConfigError(f"--deepspeed_config {path} is not JSON: {failure}. Mend the file.") from failure
    if not isinstance(value, dict):
        raise ConfigError(f"--deepspeed_config {path} holds a {type(value).__name__}. It must hold one JSON object.")
    return value


def conflicts(config: RunConfig, extra: Mapping[str, Any]) -> list[str]:
    """One sentence for each entry of a DeepSpeed file that disagrees with the run."""
    found = [f'"{key}" cannot be set here: {reason}.' for key, reason in _OWN_BUSINESS.items() if _is_active(extra.get(key))]
    for path, (area, field) in _SHARED_SETTINGS.items():
        theirs = _lookup(extra, path)
        if theirs is None or theirs == "auto":
            continue
        ours = getattr(getattr(config, area), field)
        comparable = 2.0**theirs if path[-1] == "initial_scale_power" else theirs
        if path == ("fp16", "loss_scale") and theirs == 0:
            comparable = None  # DeepSpeed's way to say dynamic
        if comparable != ours and not (ours is None and comparable is None):
            flag = "--" + field.replace("_", "-")
            found.append(f'"{".".join(path)}" is {theirs} there and {flag} is {ours} here. Make them equal or drop one.')
    return found


def _base(config: RunConfig) -> dict[str, Any]:
    optim, parallel, model = config.optim, config.parallel, config.model
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
    if model.bf16:
        settings["bf16"] = {"enabled": True}
        if stage <= 1:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if model.fp16:
        settings["fp16"] = {
            "enabled": True,
            "loss_scale": optim.loss_scale or 0,
            "initial_scale_power": max(0, round(optim.initial_loss_scale).bit_length() - 1),
            "loss_scale_window": int(optim.loss_scale_window),
            "hysteresis": optim.hysteresis,
            "min_loss_scale": optim.min_loss_scale,
        }
    return settings


def _merge(base: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with `extra` laid over it, objects merged key by key; "auto" and the governed settings keep ours."""
    merged = dict(base)
    for key, value in extra.items():
        if value == "auto" or key == "gradient_accumulation_steps":
            continue
        ours = merged.get(key)
        merged[key] = _merge(ours, value) if isinstance(ours, dict) and isinstance(value, Mapping) else value
    return merged


def _lookup(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = tree
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def _is_active(section: Any) -> bool:
    if isinstance(section, Mapping):
        return bool(section.get("enabled", True)) and bool(section)
    return section is not None
