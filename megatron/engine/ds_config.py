"""The DeepSpeed configuration: a pure function of the resolved configuration, merged with the user's own JSON."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config import RunConfig
from megatron.config.files.deepspeed_file import OFFLOADED_WEIGHTS, read_settings
from megatron.config.files.deepspeed_table import governing_flags
from megatron.errors import ConfigError

# We log progress ourselves, and DeepSpeed has no setting for "never print".
_NEVER_PRINT_STEPS = 2**31 - 1

# Elements of a sub-group on a rank where a share of the optimizer is offloaded, if the DeepSpeed file names no size:
# DeepSpeed's own 1e9 would leave one to divide.
SUB_GROUP_SIZE = 2**24

# Settings that ZeRO stages 2 and 3 do not have, with the value that they have there.
_OF_LOWER_STAGES: Mapping[str, Any] = types.MappingProxyType(
    {"prescale_gradients": False, "gradient_predivide_factor": 1}
)

_SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def deepspeed_config(config: RunConfig) -> dict[str, Any]:
    """Builds the DeepSpeed dictionary of a resolved run.

    What a `--deepspeed_config` file sets is merged over it. `parse` has checked the file and reconciled it with the
    flags; what depends on the resolved run is left to reject.

    Raises:
        ConfigError: the file, or a flag, sets something that does not fit the run.
    """
    problems = _loss_scale_problems(config)
    path = config.parallel.deepspeed_config
    extra = {} if path is None else read_settings(path)
    if config.parallel.effective_zero_stage > max(1, config.parallel.zero_stage):
        extra = {key: value for key, value in extra.items() if key not in _OF_LOWER_STAGES}
    if config.parallel.effective_zero_stage < 3 and "zero_optimization" in extra:  # whoever gave it has been told
        zero = extra["zero_optimization"]
        extra["zero_optimization"] = {key: value for key, value in zero.items() if key not in OFFLOADED_WEIGHTS}
    problems += [
        *_accumulation_problems(config, extra),
        *_accumulation_dtype_problems(config, extra),
        *_offload_problems(config, extra),
        *_scaling_problems(config, extra),
    ]
    if problems:
        raise ConfigError(problems)
    base = _base(config)
    older = extra.pop("bfloat16", {})
    for done_here in ("curriculum_learning", "data_efficiency", "optimizer", "scheduler"):
        # DeepSpeed gets an optimizer, the rate of each step, and samples of the length that they are to have
        extra.pop(done_here, None)
    merged = _merge(base, {**extra, "bf16": {**older, **extra.get("bf16", {})}})
    for place in governing_flags():
        _keep(merged, base, place)
    if config.parallel.splits_sequence:  # tensor-parallel ranks send different tokens, not parts of equal ones
        merged["pipeline"] = {**merged.get("pipeline", {}), "pipe_partitioned": False, "grad_partitioned": False}
    if offloaded_ratio(merged["zero_optimization"]) < 1:
        merged["zero_optimization"].setdefault("sub_group_size", SUB_GROUP_SIZE)
    return {key: value for key, value in merged.items() if value != {}}


def offloaded_ratio(zero: Mapping[str, Any]) -> float:
    """The share of the optimizer's state that is to be offloaded, of a `zero_optimization` section."""
    return float((zero.get("offload_optimizer") or {}).get("ratio", 1.0))


def without_ratio(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as DeepSpeed is to see them: everything is offloaded."""
    zero = dict(settings["zero_optimization"])
    if "offload_optimizer" in zero:
        zero["offload_optimizer"] = {key: value for key, value in zero["offload_optimizer"].items() if key != "ratio"}
    return {**settings, "zero_optimization": zero}


def sub_groups_to_keep(sizes: Sequence[int], ratio: float) -> list[int]:
    """The sub-groups that stay on the device: in order, as long as they fit into their share of all elements."""
    room = (1.0 - ratio) * sum(sizes)
    kept = []
    for number, size in enumerate(sizes):
        if size <= room:
            kept.append(number)
            room -= size
    return kept


def _loss_scale_problems(config: RunConfig) -> list[str]:
    """Checks the numbers that DeepSpeed takes as whole ones."""
    least = config.precision.min_loss_scale
    if not config.precision.fp16 or least == int(least):
        return []
    return [f"--min-loss-scale {least} is not an integer, as DeepSpeed's loss scaler wants. Use 1 or more."]


def _accumulation_dtype_problems(config: RunConfig, extra: Mapping[str, Any]) -> list[str]:
    """Checks the dtype in which gradients are to be accumulated."""
    dtype = extra.get("data_types", {}).get("grad_accum_dtype")
    own = _SHORT_NAMES[config.precision.dtype_name]
    if dtype in (None, "fp32", own):
        return []
    return [
        f'--deepspeed_config {config.parallel.deepspeed_config}: "data_types.grad_accum_dtype" is {dtype} there, but '
        f"the run trains in {own}. It must be {' or '.join(dict.fromkeys(['fp32', own]))}, or be omitted."
    ]


def _offload_problems(config: RunConfig, extra: Mapping[str, Any]) -> list[str]:
    """Checks that the ZeRO stage has what is to be offloaded."""
    zero, stage = extra.get("zero_optimization", {}), config.parallel.effective_zero_stage
    problems = []
    if stage == 0 and (zero.get("offload_optimizer", {}).get("device", "none") != "none" or zero.get("cpu_offload")):
        problems.append(
            f'--deepspeed_config {config.parallel.deepspeed_config}: "zero_optimization.offload_optimizer" is set '
            "there, but ZeRO stage 0 divides nothing that could be offloaded. Use --zero-stage 1 or remove it."
        )
    ratio = offloaded_ratio(zero)
    if ratio < 1 and 1 <= stage < 3:
        problems.append(
            f'--deepspeed_config {config.parallel.deepspeed_config}: "zero_optimization.offload_optimizer.ratio" is '
            f"{ratio:g} there, and ZeRO stage {stage} offloads the optimizer's state as a whole. Use --zero-stage 3 or "
            "remove it."
        )
    if ratio < 1 and config.optim.use_bnb_optimizer:
        problems.append(
            f'--deepspeed_config {config.parallel.deepspeed_config}: "zero_optimization.offload_optimizer.ratio" is '
            f"{ratio:g} there, which cannot be combined with --use-bnb-optimizer. Drop one of them."
        )
    return problems


def _scaling_problems(config: RunConfig, extra: Mapping[str, Any]) -> list[str]:
    """Checks that gradients are not to be scaled where DeepSpeed cannot."""
    path, stage = config.parallel.deepspeed_config, config.parallel.effective_zero_stage
    usual = _OF_LOWER_STAGES
    return [
        f'--deepspeed_config {path}: "{key}" is {json.dumps(extra[key])} there, which ZeRO stage {stage} does not '
        "support. Use --zero-stage 1 or remove it."
        for key, value in usual.items()
        if stage > 1 and extra.get(key, value) != value
    ]


def _accumulation_problems(config: RunConfig, extra: Mapping[str, Any]) -> list[str]:
    """Checks that the gradient accumulation steps agree with the micro-batch and global batch sizes."""
    theirs = extra.get("gradient_accumulation_steps")
    samples_per_micro_step = config.optim.micro_batch_size * config.parallel.data_parallel_size
    ours = config.optim.global_batch_size // samples_per_micro_step
    if theirs in (None, ours):
        return []
    return [
        f'--deepspeed_config {config.parallel.deepspeed_config}: "gradient_accumulation_steps" is {theirs} there, but '
        f"a global batch of {config.optim.global_batch_size} in micro-batches of {config.optim.micro_batch_size} on "
        f"{config.parallel.data_parallel_size} data-parallel rank(s) gives {ours}. Remove the entry or change "
        f"--global-batch-size to {theirs * samples_per_micro_step}."
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
        "timers": {"throughput": {"enabled": False}},  # it waits for the device twice a step
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }
    if parallel.offloads_optimizer:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if precision.bf16:
        settings["bf16"] = {"enabled": True}
    if precision.bf16 or (precision.fp16 and stage < 3):
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        if stage == 1:
            settings["communication_data_type"] = "fp32"  # else the sums in fp32 are rounded before ranks add them
    if precision.fp16:
        settings["fp16"] = {
            "enabled": True,
            "loss_scale": precision.loss_scale or 0,
            "initial_scale_power": max(0, round(precision.initial_loss_scale).bit_length() - 1),
            "loss_scale_window": int(precision.loss_scale_window),
            "hysteresis": precision.hysteresis,
            "min_loss_scale": int(precision.min_loss_scale),
        }
    return settings


def _merge(base: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with `extra` laid over it, objects merged key by key."""
    merged = dict(base)
    for key, value in extra.items():
        if key == "gradient_accumulation_steps":
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
