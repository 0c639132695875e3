"""Settings of --deepspeed_config without a flag, compared with the resolved run."""

from __future__ import annotations

import json
from collections.abc import Iterator

from megatron.config.files.deepspeed_file import offloaded_ratio, read_settings
from megatron.config.machine import Machine
from megatron.config.rules.rule import resolved_rule
from megatron.config.run_sections import ResolvedSections

_SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Settings that ZeRO stages 2 and 3 do not support, with their fixed values.
_LOWER_STAGES_ONLY = (("prescale_gradients", False), ("gradient_predivide_factor", 1))


@resolved_rule
def _loss_scale(config: ResolvedSections, machine: Machine) -> Iterator[str]:
    least = config.precision.min_loss_scale
    if config.precision.fp16 and least != int(least):
        yield f"--min-loss-scale {least} must be an integer for DeepSpeed's loss scaler. Use 1 or more."


@resolved_rule
def _settings(config: ResolvedSections, machine: Machine) -> Iterator[str]:
    path, optim, parallel = config.parallel.deepspeed_config, config.optim, config.parallel
    if path is None:
        return
    settings, stage = read_settings(path), parallel.effective_zero_stage
    given = f"--deepspeed_config {path}:"
    configured = settings.get("gradient_accumulation_steps")
    samples_per_micro_step = optim.micro_batch_size * parallel.data_parallel_size
    expected = optim.global_batch_size // samples_per_micro_step
    if configured not in (None, expected):
        yield (
            f'{given} "gradient_accumulation_steps" is {configured}, but a global batch of {optim.global_batch_size} '
            f"in micro-batches of {optim.micro_batch_size} on {parallel.data_parallel_size} data-parallel rank(s) "
            f"gives {expected}. Remove the entry or change --global-batch-size to "
            f"{configured * samples_per_micro_step}."
        )
    dtype = settings.get("data_types", {}).get("grad_accum_dtype")
    trained = _SHORT_NAMES[config.precision.dtype_name]
    if dtype not in (None, "fp32", trained):
        yield (
            f'{given} "data_types.grad_accum_dtype" is {dtype}, but the run trains in {trained}. It must be '
            f"{' or '.join(dict.fromkeys(['fp32', trained]))}, or be omitted."
        )
    zero = settings.get("zero_optimization", {})
    if stage == 0 and (zero.get("offload_optimizer", {}).get("device", "none") != "none" or zero.get("cpu_offload")):
        yield (
            f'{given} "zero_optimization.offload_optimizer" requires ZeRO stage 1 or higher. Use --zero-stage 1 or '
            "remove it."
        )
    for flag, key, requested in (
        ("--ddp-bucket-size", "reduce_bucket_size", parallel.ddp_bucket_size),
        ("--no-overlap-grad-reduce", "overlap_comm", None if parallel.overlap_grad_reduce else False),
    ):
        if requested is not None and zero.get(key, requested) != requested:
            yield f'{given} "zero_optimization.{key}" {json.dumps(zero[key])} contradicts {flag}. Remove one of them.'
    ratio = offloaded_ratio(zero)
    partial = f'{given} "zero_optimization.offload_optimizer.ratio" {ratio:g}'
    if ratio < 1 and 1 <= stage < 3:
        yield (
            f"{partial} requires ZeRO stage 3: stage {stage} offloads the whole optimizer state. Use --zero-stage 3 or "
            "remove it."
        )
    if ratio < 1 and optim.use_bnb_optimizer:
        yield f"{partial} cannot be combined with --use-bnb-optimizer. Drop one of them."
    for key, value in _LOWER_STAGES_ONLY:
        if stage > 1 and settings.get(key, value) != value:
            yield (
                f'{given} "{key}" {json.dumps(settings[key])} requires ZeRO stage 1 or lower, not {stage}. Use '
                "--zero-stage 1 or remove it."
            )
