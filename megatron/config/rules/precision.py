"""Precision: the training dtype, FP8, and support by the machine."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.machine import Machine
from megatron.config.rules.rule import notice, request_rule, resolved_rule, run_rule
from megatron.config.run_sections import ReadFlags, RunSections
from megatron.config.sections.computation import HYBRID


@run_rule
def _formats(run: RunSections) -> Iterator[str]:
    precision = run.precision
    if precision.fp16 and precision.bf16:
        yield "--fp16 cannot be combined with --bf16. Drop one of them."
    formats = {"--fp8-e4m3": precision.fp8_e4m3, "--fp8-hybrid": precision.fp8_hybrid}
    named = [name for name, is_given in formats.items() if is_given]
    if len(named) == 2:
        yield "--fp8-e4m3 cannot be combined with --fp8-hybrid. Use one format."
    elif named and named[0] != f"--fp8-{precision.fp8_format}":
        yield f"{named[0]} contradicts --fp8-format {precision.fp8_format}. Use one format."
    if precision.fp8_format is not None and not precision.bf16:
        yield f"--fp8-format {precision.fp8_format} requires --bf16, for everything but FP8 matrix products. Add it."
    if precision.fp8_format is None and precision.fp8_emulation:
        yield f"--fp8-emulation requires --fp8-format, the format to emulate. Add --fp8-format {HYBRID}."
    if precision.fp8_format is None and precision.first_last_layers_bf16:
        yield "--first-last-layers-bf16 requires --fp8-format. Drop it."
    counts = {"start": precision.num_layers_at_start_in_bf16, "end": precision.num_layers_at_end_in_bf16}
    for side, count in counts.items() if not precision.first_last_layers_bf16 else ():
        if count != 1:
            name = f"--num-layers-at-{side}-in-bf16"
            yield f"{name} {count} has no effect without --first-last-layers-bf16. Add it, or drop {name}."


@request_rule
def _blocks_in_eight_bits(run: RunSections) -> Iterator[str]:
    model, precision = run.model, run.precision
    first, last = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    is_mixed = precision.fp8_format is not None and precision.first_last_layers_bf16
    if is_mixed and not precision.float8_blocks(model.num_layers):
        yield (
            f"--num-layers-at-start-in-bf16 {first} and --num-layers-at-end-in-bf16 {last} leave none of --num-layers "
            f"{model.num_layers} in FP8. Use smaller numbers, or drop --fp8-format {precision.fp8_format}."
        )


@request_rule
def _sums_in_float32(run: ReadFlags) -> Iterator[str]:
    is_requested = run.values.get("legacy.accumulate_allreduce_grads_in_fp32")
    if is_requested and run.precision.fp16 and run.parallel.zero_stage == 3:
        yield (
            "--accumulate-allreduce-grads-in-fp32 cannot be combined with --fp16 and --zero-stage 3, which accumulate "
            "gradients in float16. Use --bf16 or a lower --zero-stage, or drop the flag."
        )


@notice
def _experts_in_bf16(run: RunSections) -> Iterator[str]:
    if run.precision.fp8_format is not None and run.model.num_experts > 1:
        yield (
            f"--fp8-format {run.precision.fp8_format} applies to attention and dense layers; experts (--num-experts "
            f"{run.model.num_experts}) stay in bf16."
        )


@resolved_rule
def supported_dtype(run: RunSections, machine: Machine) -> Iterator[str]:
    """The machine must support the dtype."""
    precision = run.precision
    device = f"{machine.device_type}: {machine.device_reason}" if machine.device_reason else machine.device_type
    if precision.fp16 and not machine.supports_fp16:
        yield f"--fp16 is not supported on this machine ({device}). Use --bf16, or drop --fp16 for float32."
    if precision.bf16 and not machine.supports_bf16:
        yield f"--bf16 is not supported on this machine ({device}). Use --fp16, or drop --bf16 for float32."
    if precision.fp8_format is not None and not (machine.supports_fp8 or precision.fp8_emulation):
        yield (
            f"--fp8-format {precision.fp8_format} is not supported on this machine ({device}): it requires a GPU of "
            "compute capability 8.9 or later (Ada, Hopper). Drop it for --bf16 alone, or add --fp8-emulation, which is "
            "slow, to compare losses."
        )
