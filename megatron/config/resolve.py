"""What only a machine and a tokenizer can tell: world size, dtype, padded vocabulary, steps from samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config.layout import layout_problems
from megatron.config.run import RunConfig
from megatron.config.sections.optim import OptimConfig
from megatron.config.sections.parallel import ParallelConfig
from megatron.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """What the machine offers."""

    device_type: str  # cpu or cuda
    world_size: int
    supports_fp16: bool
    supports_bf16: bool


@dataclass(frozen=True)
class TokenizerFacts:
    """What the configuration must know of a tokenizer."""

    vocab_size: int
    eod_id: int
    fingerprint: str


def resolve(config: RunConfig, machine: Machine, tokenizer: TokenizerFacts) -> RunConfig:
    """Completes a parsed configuration with what the machine and the tokenizer decide.

    Raises:
        ConfigError: with all problems together.
    """
    problems: list[str] = []
    notices: list[str] = list(config.notices)
    problems.extend(_dtype_problems(config, machine))
    misfits = list(_layout_problems(config, machine))
    problems.extend(misfits)
    padded, found = padded_vocab_size(config.parallel, tokenizer.vocab_size)
    problems.extend(found)
    copies = max(1, machine.world_size // config.parallel.model_parallel_size)
    batch, found = _global_batch(config, copies)
    problems.extend([] if misfits else found)
    steps, found = _train_steps(config, batch)
    problems.extend(found)
    backend, backend_notices = _backend(config, machine)
    stage, stage_notices = _zero_stage(config)
    if problems:
        raise ConfigError(problems)
    changes: dict[str, Any] = {
        "model": dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size, padded_vocab_size=padded),
        "parallel": dataclasses.replace(
            config.parallel,
            world_size=machine.world_size,
            data_parallel_size=copies,
            effective_zero_stage=stage,
            distributed_backend=backend,
        ),
        "optim": dataclasses.replace(config.optim, global_batch_size=batch, train_iters=steps),
        "notices": (*notices, *backend_notices, *stage_notices),
    }
    return dataclasses.replace(config, **changes)


def padded_vocab_size(parallel: ParallelConfig, vocab_size: int) -> tuple[int, list[str]]:
    """Rows of the word embedding over all ranks, and what is wrong with them.

    Source: bigscience Megatron-DeepSpeed `megatron/tokenizer/tokenizer.py`, `_vocab_size_with_padding`.
    """
    size = parallel.pad_vocab_size_to
    if size is None:
        multiple = parallel.make_vocab_size_divisible_by * parallel.tensor_model_parallel_size
        return -(-vocab_size // multiple) * multiple, []
    problems = []
    if size < vocab_size:
        problems.append(
            f"--pad-vocab-size-to {size} is less than the tokenizer's {vocab_size} tokens. Use at least {vocab_size}."
        )
    return size, problems


def steps_from_samples(optim: OptimConfig, full_batch: int, samples: int) -> int:
    """Steps that consume at most `samples`, the batch-size ramp-up walked step by step.

    Source: bigscience Megatron-DeepSpeed `megatron/training.py`, `update_train_iters`, and `megatron/microbatches.py`;
    unlike there, a run that ends inside the ramp-up stops before the first batch that would exceed the samples.
    """
    if optim.rampup_batch_size is None:
        return samples // full_batch
    start, increment, ramp_samples = optim.rampup_batch_size
    increments = (full_batch - start) // increment
    steps = consumed = 0
    while consumed <= ramp_samples and increments and ramp_samples:
        batch = min(full_batch, start + int(consumed / (ramp_samples / increments)) * increment)
        if consumed + batch > samples:
            return steps
        consumed += batch
        steps += 1
    return steps + (samples - consumed) // full_batch


def _dtype_problems(config: RunConfig, machine: Machine) -> Iterator[str]:
    if config.precision.fp16 and not machine.supports_fp16:
        yield f"--fp16 does not train on this machine ({machine.device_type}). Use --bf16, or drop --fp16 for float32."
    if config.precision.bf16 and not machine.supports_bf16:
        yield f"--bf16 does not train on this machine ({machine.device_type}). Use --fp16, or drop --bf16 for float32."


def _layout_problems(config: RunConfig, machine: Machine) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    yield from layout_problems(
        machine.world_size,
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        split_sizes=(model.num_attention_heads, model.ffn_hidden_size),
        most_stages=1 if parallel.zero_stage >= 2 else model.num_layers,
    )


def _global_batch(config: RunConfig, copies: int) -> tuple[int, list[str]]:
    micro = config.optim.micro_batch_size
    batch = config.optim.global_batch_size
    if batch is None:
        return micro * copies, []
    problems = []
    unit = micro * copies
    if batch % unit:
        lower = batch // unit * unit
        problems.append(
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro} x {copies} data-parallel "
            f"copies = {unit}. Use {f'{lower} or ' if lower else ''}{lower + unit}."
        )
    ramp = config.optim.rampup_batch_size
    if ramp is not None and (ramp[0] % unit or ramp[1] % unit):
        problems.append(
            f"--rampup-batch-size {ramp[0]} {ramp[1]} {ramp[2]}: start and increment must be multiples of "
            f"--micro-batch-size {micro} x {copies} data-parallel copies = {unit}. Use multiples of {unit} or fewer "
            "processes."
        )
    return batch, problems


def _train_steps(config: RunConfig, batch: int) -> tuple[int, list[str]]:
    samples = config.optim.train_samples
    if samples is None:
        return config.optim.train_iters, []
    steps = steps_from_samples(config.optim, batch, samples)
    if steps:
        return steps, []
    problem = (
        f"--train-samples {samples} is less than the first global batch (--global-batch-size {batch}), so no step "
        f"would be taken. Train at least {batch} samples, or use a smaller batch."
    )
    return 1, [problem]


def _backend(config: RunConfig, machine: Machine) -> tuple[str, list[str]]:
    asked = config.parallel.distributed_backend
    if asked == "nccl" and machine.device_type != "cuda":
        return "gloo", ["--distributed-backend nccl needs CUDA, and this machine has none: gloo is used."]
    return asked or ("nccl" if machine.device_type == "cuda" else "gloo"), []


def _zero_stage(config: RunConfig) -> tuple[int, list[str]]:
    if config.parallel.zero_stage == 0 and config.precision.dtype_name != "float32":
        notice = (
            f"--zero-stage 0 in {config.precision.dtype_name} runs as stage 1 with float32 accumulation: DeepSpeed's "
            "half-precision optimizer without ZeRO takes a wrong first step."
        )
        return 1, [notice]
    return config.parallel.zero_stage, []
