"""From a request to a run: what depends on the machine and the tokenizer is checked and filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.config.flags.section import ConfigSection
from megatron.config.pipeline_rules import chunks_per_rank, schedule_name
from megatron.config.rules.gradient_rules import noise_problems
from megatron.config.run_config import DEFAULT, PRESET, RunConfig, RunRequest, fields_of
from megatron.config.schedule import annealing_samples, planned_iterations, ranges_at_the_end, schedule
from megatron.config.sections.computation import PrecisionConfig
from megatron.config.sections.model import ModelConfig
from megatron.config.sections.optim import OptimConfig, OptimRequest
from megatron.config.sections.parallel import ParallelConfig, ParallelRequest
from megatron.config.sections.safety import SafetyConfig
from megatron.config.world import batch_sizes, fit_layout, world_problems
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
    supports_fp8: bool = False  # products of float8 matrices


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
    request, elastic_notices = fit_layout(request, machine.world_size)
    problems = [*dtype_problems(request.precision, machine), *world_problems(request, machine.world_size)]
    vocabulary, provenance, vocabulary_notices = _vocabulary(request, tokenizer)
    problems.extend(_vocabulary_problems(vocabulary, tokenizer))
    padded, vocabulary_problems = padded_vocab_size(request.parallel, vocabulary)
    problems.extend(vocabulary_problems)
    replicas = max(1, machine.world_size // request.parallel.replica_size)
    micro, batch, _ = batch_sizes(request.optim, replicas)
    optim = resolve_optim(request.optim, batch, request.data.seq_length, micro)
    problems.extend(_length_problems(request.optim, optim))
    problems.extend(noise_problems(request.report, optim))
    backend, backend_notices = _backend(request, machine)
    stage, stage_notices = _zero_stage(request)
    offloads, offload_notices = _offloading(request, machine)
    problems.extend(_offload_problems(offloads, stage))
    skip_notices = (
        []
        if request.evaluation.eval_only or request.finetuning.epochs
        else list(_skip_notices(optim, request.safety.skip_ranges))
    )
    problems.extend(_hang_timeout_problems(request, machine))
    problems.extend(_compile_problems(request, machine))
    if problems:
        raise ConfigError(problems)
    same: dict[str, Any] = {field.name: getattr(request, field.name) for field in dataclasses.fields(RunRequest)}
    parallel = {
        "world_size": machine.world_size,
        "data_parallel_size": replicas,
        "effective_zero_stage": stage,
        "schedule_name": schedule_name(request.parallel, request.model.num_layers),
        "chunks_per_rank": chunks_per_rank(request.parallel, request.model.num_layers),
        "offloads_optimizer": offloads,
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
            "notices": (
                *request.notices,
                *elastic_notices,
                *vocabulary_notices,
                *backend_notices,
                *stage_notices,
                *offload_notices,
                *_float8_notices(request),
                *skip_notices,
            ),
        }
    )


def machine_problems(request: RunRequest, machine: Machine) -> list[str]:
    """What `resolve` would refuse on a machine for any tokenizer, except for the dtype."""
    try:
        request, _ = fit_layout(request, machine.world_size)
    except ConfigError as failure:
        return failure.problems
    problems = world_problems(request, machine.world_size)
    if not problems:
        micro, batch, _ = batch_sizes(request.optim, machine.world_size // request.parallel.replica_size)
        optim = resolve_optim(request.optim, batch, request.data.seq_length, micro)
        problems.extend(_length_problems(request.optim, optim))
    return [*problems, *_hang_timeout_problems(request, machine)]


def resolve_epochs(config: RunConfig, epoch_samples: int) -> RunConfig:
    """Gives a run of --epochs its length: it ends with the step that completes the last pass.

    Args:
        config: as `resolve` left it, without a length.
        epoch_samples: samples of one pass over the training data.

    Raises:
        ConfigError: the warm-up is longer than the decay.
    """
    epochs = config.finetuning.epochs
    if epochs is None or config.evaluation.eval_only:
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


def padded_vocab_size(parallel: ParallelRequest, vocab_size: int) -> tuple[int, list[str]]:
    """Rows of the word embedding over all ranks, for a vocabulary of this many entries, and what is wrong with them.

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
            f"--model-preset {request.files.model_preset} was published with a vocabulary of {asked}; this network "
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
    if precision.fp8_format is not None and not (machine.supports_fp8 or precision.fp8_emulation):
        yield (
            f"--fp8-format {precision.fp8_format} does not run on this machine ({device}): products of 8 bits need a "
            "GPU of compute capability 8.9 or later (Ada, Hopper). Drop it for --bf16 alone, or add --fp8-emulation, "
            "which is slow, to compare losses."
        )


def _float8_notices(request: RunRequest) -> Iterator[str]:
    if request.precision.fp8_format is not None and request.model.num_experts > 1:
        yield (
            f"--fp8-format {request.precision.fp8_format}: the products of experts (--num-experts "
            f"{request.model.num_experts}) stay in bf16, those of attention and of dense layers are in 8 bits."
        )


def _length_problems(request: OptimRequest, optim: OptimConfig) -> Iterator[str]:
    samples, batch = request.train_samples, optim.global_batch_size
    if samples is not None and optim.train_iters == 0:
        yield (
            f"--train-samples {samples} is less than the first global batch (--global-batch-size {batch}), so no step "
            f"would be taken. Train at least {batch} samples, or use a smaller batch."
        )
    yield from _annealing_problems(optim)
    if request.lr_warmup_tokens is None and request.lr_decay_tokens is None and request.train_tokens is None:
        return  # the units are the same, and the section has compared them
    yield from _warmup_problems(optim)


def _annealing_problems(optim: OptimConfig) -> Iterator[str]:
    course, samples = schedule(optim), annealing_samples(optim)
    most = int(course.decay_samples - course.warmup_samples)
    if optim.train_iters > 0 and samples > max(0, most):
        by_steps = optim.lr_wsd_decay_iters is not None
        unit, size = ("iters", optim.global_batch_size) if by_steps else ("samples", 1)
        yield (
            f"--lr-wsd-decay-{unit} {samples // size} is longer than what the warm-up leaves of the run, "
            f"{most // size:,} {unit}: the learning rate would fall at once. Use {max(1, most // size // 10)}, a tenth."
        )


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

    A single process has no one waiting for it, so it has a limit only if one is given.
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


def _compile_problems(request: RunRequest, machine: Machine) -> Iterator[str]:
    """Fused attention of GPUs draws its dropout from a generator that is seeded around the call, inside the block."""
    dropout, kernels = request.model.attention_dropout, request.kernels
    if kernels.compile and dropout > 0 and kernels.fused_attention and machine.device_type == "cuda":
        yield (
            f"--compile cannot be combined with --attention-dropout {dropout:g} on a GPU, where fused attention draws "
            "it from a generator that is seeded for each call. Use --attention-dropout 0, or --no-fused-attention, "
            "whose dropout is a hash."
        )


def _offloading(request: RunRequest, machine: Machine) -> tuple[bool, list[str]]:
    """Whether the optimizer's state has a device to leave."""
    if not request.parallel.cpu_optimizer or machine.device_type == "cuda":
        return request.parallel.cpu_optimizer, []
    return False, ["--cpu-optimizer: this machine has no GPU, so the optimizer's state is in its memory already."]


def _offload_problems(offloads: bool, stage: int) -> Iterator[str]:
    if offloads and stage == 0:
        yield (
            "--cpu-optimizer cannot be combined with --zero-stage 0, in which the weights themselves are updated on "
            "the GPU. Use --zero-stage 1, or drop it."
        )
