"""The DeepSpeed configuration: a pure function of the resolved configuration, merged with the user's JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config import RunConfig
from megatron.config.files.deepspeed_file import OFFLOADED_WEIGHTS, offloaded_ratio, read_settings
from megatron.config.files.deepspeed_table import governing_flags
from megatron.config.sections.parallel import default_bucket_elements
from megatron.engine.buckets.bucket_queue import Buckets

# DeepSpeed has no setting for "never print".
_NEVER_PRINT_STEPS = 2**31 - 1

# Elements of a sub-group for partial offload, if the DeepSpeed file sets no size: DeepSpeed's default of 1e9 often
# results in a single sub-group.
SUB_GROUP_SIZE = 2**24


def deepspeed_config(config: RunConfig) -> dict[str, Any]:
    """Builds DeepSpeed's configuration of a resolved run.

    The `--deepspeed_config` file, already checked by `parse` and `resolve`, overrides settings that no flag governs.
    """
    path = config.parallel.deepspeed_config
    extra = {} if path is None else read_settings(path)
    if config.parallel.effective_zero_stage < 3 and "zero_optimization" in extra:  # a notice has reported it
        zero = extra["zero_optimization"]
        extra["zero_optimization"] = {key: value for key, value in zero.items() if key not in OFFLOADED_WEIGHTS}
    base = _base(config)
    older = extra.pop("bfloat16", {})
    for section in ("curriculum_learning", "data_efficiency", "optimizer", "scheduler"):
        # the trainer builds the optimizer, sets the learning rate of each step and cuts samples to length
        extra.pop(section, None)
    merged = _merge(base, {**extra, "bf16": {**older, **extra.get("bf16", {})}})
    for path_in_file in governing_flags():
        _keep(merged, base, path_in_file)
    if config.parallel.splits_sequence:  # tensor-parallel ranks hold different tokens, not copies
        merged["pipeline"] = {**merged.get("pipeline", {}), "pipe_partitioned": False, "grad_partitioned": False}
    if offloaded_ratio(merged["zero_optimization"]) < 1:
        merged["zero_optimization"].setdefault("sub_group_size", SUB_GROUP_SIZE)
    return {key: value for key, value in merged.items() if value != {}}


def buckets_of(settings: Mapping[str, Any], ranks: int) -> Buckets:
    """The buckets of gradients and weights, with ZeRO 0 to 2.

    Args:
        ranks: number of data-parallel ranks, which divide each bucket.
    """
    zero = settings["zero_optimization"]
    elements = int(zero.get("reduce_bucket_size", default_bucket_elements(ranks)))
    return Buckets(elements, bool(zero.get("overlap_comm", True)))


def without_ratio(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without `ratio`: DeepSpeed then offloads everything, and `keep_on_device` moves a part back."""
    zero = dict(settings["zero_optimization"])
    if "offload_optimizer" in zero:
        zero["offload_optimizer"] = {key: value for key, value in zero["offload_optimizer"].items() if key != "ratio"}
    return {**settings, "zero_optimization": zero}


def sub_groups_to_keep(sizes: Sequence[int], ratio: float) -> list[int]:
    """The indices of the sub-groups to keep on the device: in order, each that still fits into the device's share."""
    remaining = (1.0 - ratio) * sum(sizes)
    kept = []
    for index, size in enumerate(sizes):
        if size <= remaining:
            kept.append(index)
            remaining -= size
    return kept


def _base(config: RunConfig) -> dict[str, Any]:
    optim, parallel, precision = config.optim, config.parallel, config.precision
    stage = parallel.effective_zero_stage
    settings: dict[str, Any] = {
        "train_batch_size": optim.global_batch_size,
        "train_micro_batch_size_per_gpu": optim.micro_batch_size,
        "gradient_clipping": optim.clip_grad,
        "steps_per_print": _NEVER_PRINT_STEPS,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},  # it synchronizes with the device twice a step
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }
    if parallel.ddp_bucket_size is not None:
        settings["zero_optimization"]["reduce_bucket_size"] = parallel.ddp_bucket_size
    if not parallel.overlap_grad_reduce:
        settings["zero_optimization"]["overlap_comm"] = False
    if parallel.offloads_optimizer:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if precision.bf16:
        settings["bf16"] = {"enabled": True}
    if precision.bf16 or (precision.fp16 and stage < 3):
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        if stage == 1:
            settings["communication_data_type"] = "fp32"  # else fp32 sums are rounded before they are averaged
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
    """Returns `base` overridden by `extra`; objects are merged key by key."""
    merged = dict(base)
    for key, value in extra.items():
        if key == "gradient_accumulation_steps":
            continue
        old = merged.get(key)
        merged[key] = _merge(old if isinstance(old, dict) else {}, value) if isinstance(value, Mapping) else value
    return merged


def _keep(merged: dict[str, Any], base: Mapping[str, Any], path: tuple[str, ...]) -> None:
    """Restores the base value of a setting that a flag governs, such as the stage: 0 runs as 1 in half precision."""
    *parents, last = path
    for key in parents:
        merged, base = merged.get(key, {}), base.get(key, {})
    if last in base:
        merged[last] = base[last]
