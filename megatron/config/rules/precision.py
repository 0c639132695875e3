"""Number formats: the training dtype, products in eight bits, and the dtypes that a machine trains in."""

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
        yield "--fp16 and --bf16 are both given. A run has one dtype; drop one of them."
    formats = {"--fp8-e4m3": precision.fp8_e4m3, "--fp8-hybrid": precision.fp8_hybrid}
    named = [name for name, is_given in formats.items() if is_given]
    if len(named) == 2 or (named and named[0] != f"--fp8-{precision.fp8_format}"):
        verb = "contradicts" if len(named) == 1 else "contradict"
        yield f"{' and '.join(named)} {verb} --fp8-format {precision.fp8_format}. Give one format."
    if precision.fp8_format is not None and not precision.bf16:
        yield f"--fp8-format {precision.fp8_format} needs --bf16, for all that is not a product of 8 bits. Add it."
    if precision.fp8_format is None and precision.fp8_emulation:
        yield f"--fp8-emulation needs --fp8-format, the format that it emulates. Add --fp8-format {HYBRID}."
    if precision.fp8_format is None and precision.first_last_layers_bf16:
        yield "--first-last-layers-bf16 needs --fp8-format: without it all blocks are in one dtype. Drop it."
    counts = {"start": precision.num_layers_at_start_in_bf16, "end": precision.num_layers_at_end_in_bf16}
    for side, count in counts.items() if not precision.first_last_layers_bf16 else ():
        if count != 1:
            name = f"--num-layers-at-{side}-in-bf16"
            yield f"{name} {count} has no effect without --first-last-layers-bf16. Add it, or drop {name}."


@request_rule
def _blocks_in_eight_bits(run: RunSections) -> Iterator[str]:
    model, precision = run.model, run.precision
    first, last = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    if precision.first_last_layers_bf16 and not precision.float8_blocks(model.num_layers):
        yield (
            f"--num-layers-at-start-in-bf16 {first} and --num-layers-at-end-in-bf16 {last} leave none of --num-layers "
            f"{model.num_layers} to --fp8-format {precision.fp8_format}. Use smaller numbers, or drop --fp8-format."
        )


@request_rule
def _sums_in_float32(run: ReadFlags) -> Iterator[str]:
    is_asked = run.values.get("legacy.accumulate_allreduce_grads_in_fp32")
    if is_asked and run.precision.fp16 and run.parallel.zero_stage == 3:
        yield (
            "--accumulate-allreduce-grads-in-fp32 is refused with --fp16 and --zero-stage 3, where gradients are "
            "accumulated in float16. Use --bf16 or a lower --zero-stage, which accumulate them in float32, or drop the "
            "flag."
        )


@notice
def _experts_in_bf16(run: RunSections) -> Iterator[str]:
    if run.precision.fp8_format is not None and run.model.num_experts > 1:
        yield (
            f"--fp8-format {run.precision.fp8_format}: the products of experts (--num-experts "
            f"{run.model.num_experts}) stay in bf16, those of attention and of dense layers are in 8 bits."
        )


@resolved_rule
def supported_dtype(run: RunSections, machine: Machine) -> Iterator[str]:
    """A sentence for a dtype that the machine does not train in."""
    precision = run.precision
    device = f"{machine.device_type}: {machine.device_reason}" if machine.device_reason else machine.device_type
    if precision.fp16 and not machine.supports_fp16:
        yield f"--fp16 does not train on this machine ({device}). Use --bf16, or drop --fp16 for float32."
    if precision.bf16 and not machine.supports_bf16:
        yield f"--bf16 does not train on this machine ({device}). Use --fp16, or drop --bf16 for float32."
    if precision.fp8_format is not None and not (machine.supports_fp8 or precision.fp8_emulation):
        yield (
            f"--fp8-format {precision.fp8_format} does not run on this machine ({device}): products of 8 bits need a "
            "GPU of compute capability 8.9 or later (Ada, Hopper). Drop it for --bf16 alone, or add --fp8-emulation, "
            "which is slow, to compare losses."
        )
