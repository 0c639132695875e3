"""Resolves a request: checks and fills in what depends on the machine and the tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from megatron.config.elastic import fit_layout
from megatron.config.flags.section import ConfigSection
from megatron.config.machine import Machine, TokenizerFacts
from megatron.config.rules.checking import sentences, world_problems
from megatron.config.rules.data import vocabulary_problems
from megatron.config.rules.precision import supported_dtype
from megatron.config.rules.rule import Phase
from megatron.config.rules.schedule import warmup_problems
from megatron.config.run_config import RunConfig, RunRequest
from megatron.config.run_sections import DEFAULT, PRESET, fields_of
from megatron.config.schedule import batch_sizes, planned_iterations, ranges_at_the_end
from megatron.config.sections.model import ModelConfig
from megatron.config.sections.optim import OptimConfig, OptimRequest
from megatron.config.sections.parallel import ParallelConfig
from megatron.config.sections.safety import SafetyConfig
from megatron.errors import ConfigError

Resolved = TypeVar("Resolved", bound=ConfigSection)


def resolve(request: RunRequest, machine: Machine, tokenizer: TokenizerFacts) -> RunConfig:
    """Completes a request for a machine and a tokenizer.

    Raises:
        ConfigError: with all problems at once.
    """
    request, elastic_notices = fit_layout(request, machine.world_size)
    vocabulary, provenance, vocabulary_notices = _vocabulary(request, tokenizer)
    problems = list(vocabulary_problems(request.parallel, vocabulary, tokenizer))
    misfits = world_problems(request, machine.world_size)
    if misfits:  # further checks require a known number of replicas
        raise ConfigError([*supported_dtype(request, machine), *misfits, *problems])
    replicas = machine.world_size // request.parallel.replica_size
    micro, batch = batch_sizes(request.optim, replicas)
    optim = resolve_optim(request.optim, batch, request.data.seq_length, micro)
    backend, backend_notices = _backend(request, machine)
    stage, stage_notices = _zero_stage(request)
    offloads, offload_notices = _offloading(request, machine)
    parallel = {
        "world_size": machine.world_size,
        "data_parallel_size": replicas,
        "effective_zero_stage": stage,
        "schedule_name": request.parallel.schedule_for(request.model.num_layers),
        "chunks_per_rank": request.parallel.chunks_for(request.model.num_layers),
        "offloads_optimizer": offloads,
        "distributed_backend": backend,
    }
    padded = request.parallel.padded_vocab_size(vocabulary)
    same: dict[str, Any] = {field.name: getattr(request, field.name) for field in dataclasses.fields(RunRequest)}
    config = RunConfig(
        **{
            **same,
            "model": _resolved(ModelConfig, request.model, vocab_size=vocabulary, padded_vocab_size=padded),
            "parallel": _resolved(ParallelConfig, request.parallel, **parallel),
            "optim": optim,
            "safety": _resolved(SafetyConfig, request.safety, hang_timeout_seconds=_hang_timeout(request, machine)),
            "provenance": provenance,
            "notices": (
                *request.notices,
                *elastic_notices,
                *vocabulary_notices,
                *backend_notices,
                *stage_notices,
                *offload_notices,
                *_skip_notices(request, optim),
            ),
        }
    )
    problems = [*sentences(Phase.RESOLVED, config, machine), *problems]
    if problems:
        raise ConfigError(problems)
    return config


def machine_problems(request: RunRequest, machine: Machine) -> Sequence[str]:
    """Problems of a request on a machine, independent of the tokenizer."""
    try:
        resolve(request, machine, TokenizerFacts(request.model.vocab_size or 1, 0, "unknown"))
    except ConfigError as failure:
        return failure.problems
    return ()


def resolve_epochs(config: RunConfig, epoch_samples: int) -> RunConfig:
    """Sets the length of a run with --epochs: it ends with the step that completes the last epoch.

    Args:
        config: the result of `resolve`, without a length.
        epoch_samples: samples of one epoch of training data.

    Raises:
        ConfigError: the warmup is longer than the decay.
    """
    epochs = config.finetuning.epochs
    if epochs is None or config.evaluation.eval_only:
        return config
    length = config.data.seq_length
    optim = dataclasses.replace(config.optim, train_iters=0, train_tokens=epochs * epoch_samples * length)
    optim = dataclasses.replace(optim, train_iters=planned_iterations(optim))
    problems = list(warmup_problems(optim))
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(config, optim=optim)


def resolve_optim(
    request: OptimRequest, global_batch_size: int, tokens_per_sample: int, micro_batch_size: int | None = None
) -> OptimConfig:
    """Completes the optimizer section of a run with these sizes; a run without a length has no steps."""
    rate = request.min_lr if request.lr is None else request.lr
    resolved = _resolved(
        OptimConfig,
        request,
        micro_batch_size=micro_batch_size or request.micro_batch_size or 1,
        global_batch_size=global_batch_size,
        lr=rate,
        train_iters=request.train_iters or 0,
        tokens_per_sample=tokens_per_sample,
        most_iters=request.given_iters if request.train_tokens is not None else None,
    )
    return dataclasses.replace(resolved, train_iters=planned_iterations(resolved))


def _vocabulary(request: RunRequest, tokenizer: TokenizerFacts) -> tuple[int, Mapping[str, str], list[str]]:
    """The vocabulary size, the provenance of all fields, and notices for the user.

    The vocabulary size of a preset is replaced by the tokenizer's, which is rarely the published one: unused entries
    would cost memory and time. An explicit --vocab-size is kept.
    """
    requested, name = request.model.vocab_size, "model.vocab_size"
    notices = []
    if request.provenance.get(name) != PRESET:
        if requested is not None and requested < tokenizer.vocab_size:
            notices.append(
                f"--vocab-size {requested} excludes {tokenizer.vocab_size - requested} of the tokenizer's "
                f"{tokenizer.vocab_size} tokens. Data that contains them is refused."
            )
        return requested or tokenizer.vocab_size, request.provenance, notices
    if requested is not None and requested != tokenizer.vocab_size:
        notices.append(
            f"--model-preset {request.files.model_preset} was published with a vocabulary of {requested}; this network "
            f"has the tokenizer's {tokenizer.vocab_size} tokens. Use --vocab-size {requested} for the published "
            "network."
        )
    return tokenizer.vocab_size, {**request.provenance, name: DEFAULT}, notices


def _resolved(cls: type[Resolved], request: ConfigSection, **values: Any) -> Resolved:
    """A section with the fields of the request and the computed values."""
    same = {field.name: getattr(request, field.name) for field in fields_of(type(request))}
    return cls(**{**same, **values})


def _hang_timeout(request: RunRequest, machine: Machine) -> float:
    requested = request.safety.hang_timeout_seconds
    if requested is None:
        # Less than the timeout of collectives, whose error does not name the cause; no limit for a single process.
        return request.parallel.distributed_timeout_minutes * 30.0 if machine.world_size > 1 else 0.0
    return requested


def _skip_notices(request: RunRequest, optim: OptimConfig) -> Iterator[str]:
    """Notices about ranges of `--skip-train-iteration-range` at or after the end of the run."""
    if request.evaluation.eval_only or request.finetuning.epochs:
        return
    lengths = {"--train-samples": optim.train_samples, "--train-tokens": optim.train_tokens}
    lengths["--train-iters"] = None if optim.is_counted_in_samples else optim.given_iters
    length = " ".join(f"{name} {value}" for name, value in lengths.items() if value)
    for (first, last), is_reached in ranges_at_the_end(optim, request.safety.skip_ranges):
        effect = "no data is left, so the run ends" if is_reached else "the run ends"
        yield f"--skip-train-iteration-range {first}-{last} has no effect: {effect} before step {first} ({length})."


def _backend(request: RunRequest, machine: Machine) -> tuple[str, list[str]]:
    requested = request.parallel.distributed_backend
    if requested == "nccl" and machine.device_type != "cuda":
        return "gloo", ["--distributed-backend nccl requires CUDA, which is not available: gloo is used."]
    return requested or ("nccl" if machine.device_type == "cuda" else "gloo"), []


def _zero_stage(request: RunRequest) -> tuple[int, list[str]]:
    if request.parallel.zero_stage == 0 and request.precision.dtype_name != "float32":
        notice = (
            f"--zero-stage 0 in {request.precision.dtype_name} runs as stage 1 with float32 accumulation: the first "
            "step of DeepSpeed's half-precision optimizer without ZeRO is wrong."
        )
        return 1, [notice]
    return request.parallel.zero_stage, []


def _offloading(request: RunRequest, machine: Machine) -> tuple[bool, list[str]]:
    """Returns if the optimizer state is offloaded, and notices."""
    if not request.parallel.cpu_optimizer or machine.device_type == "cuda":
        return request.parallel.cpu_optimizer, []
    return False, ["--cpu-optimizer has no effect without a GPU: the optimizer state is in host memory already."]
