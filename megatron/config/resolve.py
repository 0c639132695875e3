"""From a request to a run: what depends on the machine and the tokenizer is checked and filled in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.config.flags.section import ConfigSection
from megatron.config.layout import layout_problems
from megatron.config.run import DEFAULT, PRESET, RunConfig, RunRequest, fields_of
from megatron.config.schedule import planned_iterations, ranges_at_the_end, schedule
from megatron.config.sections.model import ModelConfig
from megatron.config.sections.optim import OptimConfig, OptimRequest
from megatron.config.sections.parallel import ParallelConfig, ParallelRequest
from megatron.config.sections.precision import PrecisionConfig
from megatron.config.sections.safety import SafetyConfig
from megatron.errors import ConfigError

Resolved = TypeVar("Resolved", bound=ConfigSection)


@dataclass(frozen=True)
class Machine:
    """What the configuration must know of the machine."""

    device_type: str  # cpu or cuda
    world_size: int
    supports_fp16: bool
    supports_bf16: bool
    device_reason: str = ""  # why there is no CUDA, where that is known


@dataclass(frozen=True)
class TokenizerFacts:
    """What the configuration must know of a tokenizer."""

    vocab_size: int
    eod_id: int
    fingerprint: str


def resolve(request: RunRequest, machine: Machine, tokenizer: TokenizerFacts) -> RunConfig:
    """Completes what was asked for with what the machine and the tokenizer decide.

    Raises:
        ConfigError: with all problems at once.
    """
    problems = [*dtype_problems(request.precision, machine), *launch_problems(request, machine)]
    vocabulary, provenance, vocabulary_notices = _vocabulary(request, tokenizer)
    problems.extend(_vocabulary_problems(vocabulary, tokenizer))
    padded, found = padded_vocab_size(request.parallel, vocabulary)
    problems.extend(found)
    replicas = _replicas(request, machine)
    micro, batch, _ = _batch_sizes(request.optim, replicas)
    optim = resolve_optim(request.optim, batch, request.data.seq_length, micro)
    problems.extend(_length_problems(request.optim, optim))
    backend, backend_notices = _backend(request, machine)
    stage, stage_notices = _zero_stage(request)
    skip_notices = (
        []
        if request.control.eval_only or request.finetuning.epochs
        else list(_skip_notices(optim, request.control.skip_ranges))
    )
    if problems:
        raise ConfigError(problems)
    same: dict[str, Any] = {field.name: getattr(request, field.name) for field in dataclasses.fields(RunRequest)}
    parallel = {
        "world_size": machine.world_size,
        "data_parallel_size": replicas,
        "effective_zero_stage": stage,
        "distributed_backend": backend,
    }
    return RunConfig(
        **{
            **same,
            "model": _resolved(ModelConfig, request.model, vocab_size=vocabulary, padded_vocab_size=padded),
            "parallel": _resolved(ParallelConfig, request.parallel, **parallel),
            "optim": optim,
            "safety": _resolved(SafetyConfig, request.safety, hang_timeout_seconds=_hang_timeout(request, machine)),
            "provenance": provenance,
            "notices": (*request.notices, *vocabulary_notices, *backend_notices, *stage_notices, *skip_notices),
        }
    )


def launch_problems(request: RunRequest, machine: Machine) -> list[str]:
    """One sentence for everything that is wrong with a request for so many processes: layout, batch sizes, timeouts.

    Batch sizes are not shared out in a layout that does not fit, or if they contradict each other already.
    """
    misfits = list(_layout_problems(request, machine))
    shares: list[str] = []
    if not misfits and not any(request.optim.all_problems()):
        _, _, shares = _batch_sizes(request.optim, _replicas(request, machine))
    return [*misfits, *shares, *_hang_timeout_problems(request, machine)]


def length_problems(request: RunRequest, machine: Machine) -> list[str]:
    """One sentence for everything that is wrong with the length of a run whose processes fit."""
    micro, batch, _ = _batch_sizes(request.optim, _replicas(request, machine))
    return list(_length_problems(request.optim, resolve_optim(request.optim, batch, request.data.seq_length, micro)))


def resolve_epochs(config: RunConfig, epoch_samples: int) -> RunConfig:
    """Gives a run of --epochs its length: it ends with the step that completes the last pass.

    Args:
        config: as `resolve` left it, without a length.
        epoch_samples: samples of one pass over the training data.

    Raises:
        ConfigError: the warm-up is longer than the decay.
    """
    epochs = config.finetuning.epochs
    if epochs is None or config.control.eval_only:
        return config
    length = config.data.seq_length
    optim = dataclasses.replace(config.optim, train_iters=0, train_tokens=epochs * epoch_samples * length)
    optim = dataclasses.replace(optim, train_iters=planned_iterations(optim))
    problems = list(_warmup_problems(optim))
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(config, optim=optim)


def resolve_optim(
    request: OptimRequest, global_batch_size: int, tokens_per_sample: int, micro_batch_size: int | None = None
) -> OptimConfig:
    """Completes the optimizer section of a run with these sizes; a run without a length plans no step."""
    rate = request.min_lr if request.lr is None else request.lr
    found = _resolved(
        OptimConfig,
        request,
        micro_batch_size=micro_batch_size or request.micro_batch_size or 1,
        global_batch_size=global_batch_size,
        lr=rate,
        train_iters=request.train_iters or 0,
        tokens_per_sample=tokens_per_sample,
        most_iters=request.given_iters if request.train_tokens is not None else None,
    )
    return dataclasses.replace(found, train_iters=planned_iterations(found))


def padded_vocab_size(parallel: ParallelRequest, vocab_size: int) -> tuple[int, list[str]]:
    """Rows of the word embedding over all ranks, for a vocabulary of so many entries, and what is wrong with them.

    Source: bigscience Megatron-DeepSpeed `megatron/tokenizer/tokenizer.py`, `_vocab_size_with_padding`.
    """
    size = parallel.pad_vocab_size_to
    if size is None:
        multiple = parallel.make_vocab_size_divisible_by * parallel.tensor_model_parallel_size
        return -(-vocab_size // multiple) * multiple, []
    problems = []
    if size < vocab_size:
        problems.append(
            f"--pad-vocab-size-to {size} is less than the {vocab_size} entries of the vocabulary. Use at least "
            f"{vocab_size}."
        )
    return size, problems


def _vocabulary(request: RunRequest, tokenizer: TokenizerFacts) -> tuple[int, Mapping[str, str], list[str]]:
    """The entries of the network's vocabulary, the provenance of all fields, and what the user should know.

    A preset gives the shape of a network and not its vocabulary: the tokenizer of a run is seldom the published one,
    and entries that no token has would cost memory and time. A number that is given holds.
    """
    asked, place = request.model.vocab_size, "model.vocab_size"
    notices = []
    if request.provenance.get(place) != PRESET:
        if asked is not None and asked < tokenizer.vocab_size:
            notices.append(
                f"--vocab-size {asked} leaves out {tokenizer.vocab_size - asked} of the tokenizer's "
                f"{tokenizer.vocab_size} tokens. Data that contain them are refused."
            )
        return asked or tokenizer.vocab_size, request.provenance, notices
    if asked is not None and asked != tokenizer.vocab_size:
        notices.append(
            f"--model-preset {request.control.model_preset} was published with a vocabulary of {asked}; this network "
            f"has the tokenizer's {tokenizer.vocab_size} tokens. Give --vocab-size {asked} for the published network."
        )
    return tokenizer.vocab_size, {**request.provenance, place: DEFAULT}, notices


def _vocabulary_problems(vocabulary: int, tokenizer: TokenizerFacts) -> Iterator[str]:
    """A vocabulary may lack tokens of the tokenizer, which the data then may not contain, but not its last one of a
    document.
    """
    if vocabulary <= tokenizer.eod_id:
        yield (
            f"--vocab-size {vocabulary} has no entry for the end-of-document token, {tokenizer.eod_id} of the "
            f"tokenizer's {tokenizer.vocab_size} tokens. Give --vocab-size {tokenizer.vocab_size}, or drop it."
        )


def _resolved(cls: type[Resolved], request: ConfigSection, **values: Any) -> Resolved:
    """A section with the fields of the request and the values that were computed."""
    same = {field.name: getattr(request, field.name) for field in fields_of(type(request))}
    return cls(**{**same, **values})


def dtype_problems(precision: PrecisionConfig, machine: Machine) -> Iterator[str]:
    """A sentence for a dtype that the machine does not train in."""
    device = f"{machine.device_type}: {machine.device_reason}" if machine.device_reason else machine.device_type
    if precision.fp16 and not machine.supports_fp16:
        yield f"--fp16 does not train on this machine ({device}). Use --bf16, or drop --fp16 for float32."
    if precision.bf16 and not machine.supports_bf16:
        yield f"--bf16 does not train on this machine ({device}). Use --fp16, or drop --bf16 for float32."


def _replicas(request: RunRequest, machine: Machine) -> int:
    return max(1, machine.world_size // request.parallel.model_parallel_size)


def _layout_problems(request: RunRequest, machine: Machine) -> Iterator[str]:
    model, parallel = request.model, request.parallel
    yield from layout_problems(
        machine.world_size,
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        split_sizes=(model.num_attention_heads, *model.widths.values()),
        most_stages=1 if parallel.zero_stage >= 2 else model.num_layers,
    )


def _batch_sizes(optim: OptimRequest, replicas: int) -> tuple[int, int, list[str]]:
    """The micro-batch, the global batch, and what is wrong with them."""
    micro, batch = optim.micro_batch_size, optim.global_batch_size
    if batch is None:
        size = micro or 1
        return size, size * replicas, []
    if micro is None:
        return _whole_share(optim, batch, replicas)
    problems = []
    unit = micro * replicas
    if batch % unit:
        lower = batch // unit * unit
        problems.append(
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro} x {replicas} data-parallel "
            f"replicas = {unit}. Use {f'{lower} or ' if lower else ''}{lower + unit}."
        )
    ramp = optim.rampup_batch_size
    if ramp is not None and (ramp[0] % unit or ramp[1] % unit):
        problems.append(
            f"--rampup-batch-size {ramp[0]} {ramp[1]} {ramp[2]}: start and increment must be multiples of "
            f"--micro-batch-size {micro} x {replicas} data-parallel replicas = {unit}. Use multiples of {unit} or "
            "fewer processes."
        )
    return micro, batch, problems


def _whole_share(optim: OptimRequest, batch: int, replicas: int) -> tuple[int, int, list[str]]:
    """The same where each replica takes its share of every global batch in one forward pass."""
    sizes = [batch, *(optim.rampup_batch_size or ())[:2]]
    problems = [
        f"a global batch of {size} (--global-batch-size, --rampup-batch-size) cannot be shared by {replicas} "
        f"data-parallel replicas. Use a multiple of {replicas}, or another number of processes."
        for size in sizes
        if size % replicas
    ]
    return max(1, math.gcd(*sizes) // replicas), batch, problems


def _length_problems(request: OptimRequest, optim: OptimConfig) -> Iterator[str]:
    samples, batch = request.train_samples, optim.global_batch_size
    if samples is not None and optim.train_iters == 0:
        yield (
            f"--train-samples {samples} is less than the first global batch (--global-batch-size {batch}), so no step "
            f"would be taken. Train at least {batch} samples, or use a smaller batch."
        )
    if request.lr_warmup_tokens is None and request.lr_decay_tokens is None and request.train_tokens is None:
        return  # the units are the same, and the section has compared them
    yield from _warmup_problems(optim)


def _warmup_problems(optim: OptimConfig) -> Iterator[str]:
    course, length = schedule(optim), optim.tokens_per_sample
    if optim.train_iters > 0 and course.warmup_samples >= course.decay_samples:
        yield (
            f"The warm-up of the learning rate takes {round(course.warmup_samples * length)} tokens, which is not less "
            f"than the {round(course.decay_samples * length)} tokens of the decay that contains it (--seq-length "
            f"{length}). Use a shorter warm-up or a longer --lr-decay-tokens."
        )


def _hang_timeout(request: RunRequest, machine: Machine) -> float:
    """Seconds without progress after which the run ends; before a collective times out, whose error names no cause.

    A single process makes nobody wait, so it has a limit only if one is given.
    """
    asked = request.safety.hang_timeout_seconds
    if asked is None:
        return request.parallel.distributed_timeout_minutes * 30.0 if machine.world_size > 1 else 0.0
    return asked


def _hang_timeout_problems(request: RunRequest, machine: Machine) -> Iterator[str]:
    minutes, seconds = request.parallel.distributed_timeout_minutes, _hang_timeout(request, machine)
    if seconds >= minutes * 60:
        yield (
            f"--hang-timeout-seconds {seconds:g} is not less than the {minutes * 60} seconds of "
            f"--distributed-timeout-minutes {minutes}, after which a collective fails without naming the rank that "
            f"hangs. Use at most {minutes * 30}, or raise --distributed-timeout-minutes."
        )


def _skip_notices(optim: OptimConfig, ranges: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Ranges of `--skip-train-iteration-range` that a run from the start does not get beyond."""
    lengths = {"--train-samples": optim.train_samples, "--train-tokens": optim.train_tokens}
    lengths["--train-iters"] = None if optim.is_counted_in_samples else optim.given_iters
    length = " ".join(f"{name} {value}" for name, value in lengths.items() if value)
    for (first, last), is_reached in ranges_at_the_end(optim, ranges):
        effect = "it leaves no data, so the run ends" if is_reached else "the run ends"
        yield f"--skip-train-iteration-range {first}-{last} has no effect: {effect} before step {first} ({length})."


def _backend(request: RunRequest, machine: Machine) -> tuple[str, list[str]]:
    asked = request.parallel.distributed_backend
    if asked == "nccl" and machine.device_type != "cuda":
        return "gloo", ["--distributed-backend nccl needs CUDA, and this machine has none: gloo is used."]
    return asked or ("nccl" if machine.device_type == "cuda" else "gloo"), []


def _zero_stage(request: RunRequest) -> tuple[int, list[str]]:
    if request.parallel.zero_stage == 0 and request.precision.dtype_name != "float32":
        notice = (
            f"--zero-stage 0 in {request.precision.dtype_name} runs as stage 1 with float32 accumulation: DeepSpeed's "
            "half-precision optimizer without ZeRO gets the first step wrong."
        )
        return 1, [notice]
    return request.parallel.zero_stage, []
