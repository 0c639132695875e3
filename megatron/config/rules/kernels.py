"""Kernel implementations, torch.compile, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.machine import Machine
from megatron.config.rules.rule import request_rule, resolved_rule, run_rule
from megatron.config.run_sections import RunSections
from megatron.config.sections.computation import SWITCHES, TORCH
from megatron.config.sections.pipelines import SPLIT_SCHEDULES


@run_rule
def _switches(run: RunSections) -> Iterator[str]:
    kernels, named = run.kernels, dict(reversed(run.kernels.parts))
    for field, operation in SWITCHES.items():
        if not getattr(kernels, field) and named.get(operation, TORCH) != TORCH:
            option = f"--no-{field.replace('_', '-')}"
            yield f"{option} contradicts --kernels {kernels.kernels}. Drop one of them."


@request_rule
def _compile(run: RunSections) -> Iterator[str]:
    model, parallel = run.model, run.parallel
    if not run.kernels.compile:
        return
    if parallel.zero_stage == 3:
        yield (
            "--compile cannot be combined with --zero-stage 3, whose hooks gather the weights of each layer inside the "
            "block. Use --zero-stage 2, or drop --compile."
        )
    if model.num_experts > 1:
        reason = "the host reads the number of tokens per expert inside the block"
        if model.drops_tokens:
            reason = "routers record by layer number, so blocks could not share compiled code"
        yield f"--compile cannot be combined with --num-experts {model.num_experts}: {reason}. Drop --compile."
    schedule = parallel.schedule_for(model.num_layers)
    chunks = parallel.pipeline_model_parallel_size * parallel.chunks_for(model.num_layers)
    if schedule in SPLIT_SCHEDULES and chunks > 1:
        yield (
            f"--compile cannot be combined with the pipeline schedule {schedule}, which computes weight gradients "
            "separately from input gradients: a compiled block computes both together. Use --pipeline-schedule "
            f"{SPLIT_SCHEDULES[schedule]}, or drop --compile."
        )
    if run.optim.curriculum_learning:
        yield (
            "--compile cannot be combined with --curriculum-learning: every sequence length would be recompiled. Drop "
            "one of them."
        )


@resolved_rule
def _compiled_dropout(run: RunSections, machine: Machine) -> Iterator[str]:
    dropout, kernels = run.model.attention_dropout, run.kernels
    if kernels.compile and dropout > 0 and kernels.fused_attention and machine.device_type == "cuda":
        yield (
            f"--compile cannot be combined with --attention-dropout {dropout:g} on a GPU, where fused attention seeds "
            "a generator around each call. Use --attention-dropout 0, or --no-fused-attention, whose dropout is a hash."
        )


@run_rule
def _granularity(run: RunSections) -> Iterator[str]:
    if run.recompute.recompute_activations and run.recompute.recompute_granularity == "full":
        yield "--recompute-activations contradicts --recompute-granularity full: it means selective. Drop one of them."


@request_rule
def _recompute(run: RunSections) -> Iterator[str]:
    model, parallel, recompute = run.model, run.parallel, run.recompute
    ranks, chunk = parallel.tensor_model_parallel_size, recompute.checkpoint_num_layers
    if recompute.checkpoint_activations and chunk > 1:
        yield (
            f"--checkpoint-num-layers {chunk} is not supported: layers are recomputed one at a time. Use "
            "--checkpoint-num-layers 1; --sequence-parallel splits the stored inputs over tensor-parallel ranks."
        )
    is_split = recompute.distributes_saved and not parallel.splits_sequence
    if is_split and model.hidden_size % ranks:
        yield (
            f"--distribute-saved-activations cannot split --hidden-size {model.hidden_size} over "
            f"--tensor-model-parallel-size {ranks}. Use a width that is a multiple of {ranks}, or drop it."
        )
