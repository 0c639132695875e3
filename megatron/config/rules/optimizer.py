"""Optimizers, the placement of their state, and logged gradient statistics."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.machine import Machine
from megatron.config.rules.rule import request_rule, resolved_rule, run_rule
from megatron.config.run_sections import ReadFlags, ResolvedSections, RunSections
from megatron.config.sections.optimizers import ADAM, MATMUL_PRECISIONS, MUON, SCHEDULE_FREE
from megatron.config.sections.pipelines import DEEPSPEED

_NOISE = "--log-gradient-noise-scale"


@run_rule
def _adam(run: RunSections) -> Iterator[str]:
    model, optim, parallel = run.model, run.optim, run.parallel
    given = f"--optimizer {optim.optimizer}"
    if optim.use_bnb_optimizer and optim.optimizer != ADAM:
        yield f"--use-bnb-optimizer cannot be combined with {given}: it implements AdamW. Use --optimizer adam."
    if optim.use_bnb_optimizer and parallel.cpu_optimizer:
        yield "--use-bnb-optimizer cannot be combined with --cpu-optimizer: it updates on the GPU. Drop one of them."
    if model.use_mup and optim.optimizer != ADAM:
        yield f"--use-mup cannot be combined with {given}: its learning rates are for Adam. Use --optimizer adam."


@run_rule
def _schedule_free(run: RunSections) -> Iterator[str]:
    optim, given = run.optim, f"--optimizer {run.optim.optimizer}"
    if optim.optimizer != SCHEDULE_FREE:
        return
    if optim.lr_decay_style != "constant":
        yield (
            f"{given} cannot be combined with --lr-decay-style {optim.lr_decay_style}: averaging replaces the decay. "
            "Use --lr-decay-style constant, with or without warmup."
        )
    if optim.ema_decay is not None:
        yield (
            f"{given} cannot be combined with --ema-decay {optim.ema_decay}: it already averages the weights. Drop "
            "--ema-decay."
        )
    if optim.adam_beta1 == 0:
        yield (
            f"{given} cannot be combined with --adam-beta1 0: the average could not be recovered. Use the default, 0.9."
        )


@run_rule
def _muon(run: RunSections) -> Iterator[str]:
    optim, parallel, given = run.optim, run.parallel, f"--optimizer {run.optim.optimizer}"
    if optim.optimizer != MUON:
        return
    precision = MATMUL_PRECISIONS.get(optim.muon_fp32_matmul_prec or "")
    if precision is not None and optim.muon_dtype not in (None, precision):
        yield (
            f"--muon-fp32-matmul-prec {optim.muon_fp32_matmul_prec} means {precision} and contradicts --muon-dtype "
            f"{optim.muon_dtype}. Drop one of them."
        )
    if parallel.zero_stage == 3:
        yield (
            f"{given} cannot be combined with --zero-stage 3, which updates parameters in groups: matrices would be "
            "gathered one by one. Use --zero-stage 2, or 1 in a pipeline."
        )
    if parallel.cpu_optimizer:
        yield (
            f"{given} cannot be combined with --cpu-optimizer: its matrix products are too slow on the host. Drop "
            "--cpu-optimizer; --zero-stage 2 shards the optimizer state."
        )


@request_rule
def _sharded_state(run: ReadFlags) -> Iterator[str]:
    if run.values.get("legacy.use_distributed_optimizer") and run.parallel.zero_stage == 0:
        yield (
            "--use-distributed-optimizer contradicts --zero-stage 0, which does not shard the optimizer state. Use "
            "--zero-stage 1, or drop --use-distributed-optimizer."
        )


@resolved_rule
def _offloaded_state(config: ResolvedSections, machine: Machine) -> Iterator[str]:
    if config.parallel.offloads_optimizer and config.parallel.effective_zero_stage == 0:
        yield (
            "--cpu-optimizer cannot be combined with --zero-stage 0, which updates the weights on the GPU. Use "
            "--zero-stage 1, or drop it."
        )


@request_rule
def _logged_gradients(run: RunSections) -> Iterator[str]:
    report, parallel = run.report, run.parallel
    flags = {
        "--log-grad-norm": report.log_grad_norm,
        "--log-num-zeros-in-grad": report.log_num_zeros_in_grad,
        _NOISE: report.log_gradient_noise_scale,
    }
    for name, is_given in flags.items():
        if is_given and parallel.zero_stage == 3:
            yield (
                f"{name} cannot be combined with --zero-stage 3: DeepSpeed reduces and partitions gradients "
                f"a few layers at a time. Use --zero-stage 2, or drop {name}."
            )
    if not report.log_gradient_noise_scale:
        return
    if parallel.ring_size * parallel.ulysses_size > 1:
        yield (
            f"{_NOISE} cannot be combined with --context-parallel-size or --ds-sequence-parallel-size: no rank has the "
            "gradient of a whole micro-batch. Drop one of them."
        )
    if parallel.pipeline_model_parallel_size > 1 and parallel.pipeline_engine == DEEPSPEED:
        yield (
            f"{_NOISE} cannot be combined with --pipeline-engine deepspeed, which accumulates gradients itself. Use "
            "--pipeline-engine own."
        )


@resolved_rule
def _noise_scale(config: ResolvedSections, machine: Machine) -> Iterator[str]:
    report, optim = config.report, config.optim
    if report.log_gradient_noise_scale and optim.global_batch_size <= optim.micro_batch_size:
        yield (
            f"{_NOISE} requires several micro-batches per step, but --global-batch-size {optim.global_batch_size} is "
            f"one (--micro-batch-size {optim.micro_batch_size}). Use smaller micro-batches."
        )
