"""Turns a command line into a plan: its job, its devices, and the layouts that its flags allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

from megatron.config import NO_PROGRAM, Machine, Program, RunRequest, TokenizerFacts, resolve
from megatron.config.parse import read_flags
from megatron.config.program_flags import flags_with_fields
from megatron.config.rules.checking import world_problems
from megatron.config.run_sections import GIVEN
from megatron.config.schedule import batch_sizes
from megatron.config.sections.optimizers import MUON
from megatron.config.sections.parallel import RING, ParallelRequest
from megatron.config.sections.pipelines import is_schedule_file
from megatron.errors import ConfigError
from megatron.parallel.schedule.building import build_schedule
from megatron.parallel.schedule.division import Division
from megatron.parallel.schedule.schedule_files import read_orders
from trident.plan.hardware import Cluster, device_of, links_of, links_of_device
from trident.plan.job import Job
from trident.plan.layouts import ATTENTION, BLOCKS, NOTHING, Layout
from trident.plan.report import detail_lines, plan_lines
from trident.plan.search import LayoutEstimate, LayoutPlan, estimate, search

DEFAULT_VOCABULARY = 50257
_DEVICES_PER_NODE = 8
# Values of required flags that a plan does not use: data, tokenizer and learning rate schedule.
_PLACEHOLDERS = {
    "--data-path": "not-read",
    "--vocab-file": "not-read",
    "--merge-file": "not-read",
    "--tokenizer-model": "not-read",
    "--tokenizer-name-or-path": "not-read",
    "--micro-batch-size": "1",
    "--train-iters": "1",
    "--lr": "1e-4",
}
# Attributes of a layout by the flag that fixes them.
_FIXED = {
    "parallel.tensor_model_parallel_size": "tp",
    "parallel.pipeline_model_parallel_size": "pp",
    "parallel.context_parallel_size": "cp",
    "parallel.ds_sequence_parallel_size": "ulysses",
    "parallel.expert_model_parallel_size": "ep",
    "parallel.expert_tensor_parallel_size": "keeps_experts_whole",
    "parallel.zero_stage": "zero",
    "parallel.pipeline_schedule": "schedule",
    "parallel.enable_zbh1_pipeline": "schedule",
    "parallel.virtual_pipeline_model_parallel_size": "chunks",
    "parallel.sequence_parallel": "splits_sequence",
    "optim.micro_batch_size": "micro_batch",
    "recompute.recompute_granularity": "recompute",
    "recompute.checkpoint_activations": "recompute",
}
_KEPT_FLAGS = ("zero_stage", "cpu_optimizer", "make_vocab_size_divisible_by", "pad_vocab_size_to")
_VIRTUAL = "--virtual-pipeline-model-parallel-size"
# Other flags of sequences and of pipelines, which would contradict a layout.
_SEQUENCE_FLAGS = frozenset({"parallel.cp_comm_type", "parallel.hierarchical_context_parallel_sizes"})
_PIPELINE_FLAGS = frozenset(
    {
        "parallel.pipeline_schedule",
        "parallel.enable_zbh1_pipeline",
        "parallel.virtual_pipeline_model_parallel_size",
        "parallel.num_layers_per_virtual_pipeline_stage",
    }
)


def read_plan_request(argv: Sequence[str], program: Program = NO_PROGRAM) -> tuple[list[str], RunRequest]:
    """Reads a command line that may lack data, tokenizer and batch sizes; returns it with placeholders, and parsed.

    Raises:
        ConfigError: all other problems.
    """
    draft = read_flags(argv, program=program)
    placeholders = dict(_PLACEHOLDERS)
    context = draft.run.model.max_position_embeddings
    if isinstance(context, int):
        placeholders["--seq-length"] = str(context)
    missing = {
        option: value
        for option, value in placeholders.items()
        if any(sentence.startswith(option) and " required" in sentence for sentence in draft.problems)
    }
    arguments = [*argv, *(part for pair in missing.items() for part in pair)]
    request = read_flags(arguments, program=program).request()
    return arguments, dataclasses.replace(request, provenance=draft.run.provenance)


def cluster_of(request: RunRequest, devices: int | None = None) -> Cluster:
    """The devices that a request is planned for.

    Args:
        devices: their number, if the request does not set it.

    Raises:
        ConfigError: a name is unknown, or the nodes do not divide the devices.
    """
    planning = request.planning
    count = planning.planned_devices or devices or _DEVICES_PER_NODE
    per_node = min(count, _DEVICES_PER_NODE)
    if planning.nodes is not None:
        if count % planning.nodes:
            raise ConfigError(f"--nodes {planning.nodes} does not divide {count} devices. Use a divisor of {count}.")
        per_node = count // planning.nodes
    name = planning.interconnect
    links = links_of_device(planning.planned_device) if name is None else links_of(name)
    return Cluster(device_of(planning.planned_device), links, count, per_node)


def job_of(request: RunRequest, cluster: Cluster) -> Job:
    """The job of a request. The default global batch is one micro-batch per device, or set by a schedule file.

    Raises:
        ConfigError: the request cannot be resolved.
    """
    vocabulary = request.model.vocab_size or DEFAULT_VOCABULARY
    batch = request.optim.global_batch_size
    if batch is None:
        batch = (request.optim.micro_batch_size or 1) * cluster.devices
        if is_schedule_file(request.parallel.pipeline_schedule):
            placement, passes, _ = read_orders(request.parallel.pipeline_schedule or "")
            batch = max(1, batch // placement.ranks) * passes
    # Resolved for one process: except for padding, the sizes of the network do not depend on the layout.
    parallel = ParallelRequest(**{name: getattr(request.parallel, name) for name in _KEPT_FLAGS})
    optim = dataclasses.replace(request.optim, micro_batch_size=1, global_batch_size=batch)
    alone = dataclasses.replace(request, parallel=parallel, optim=optim)
    config = resolve(
        alone, Machine("cuda", 1, True, True, supports_fp8=True), TokenizerFacts(vocabulary, vocabulary - 1, "")
    )
    weight_bytes = 4 if request.precision.dtype_name == "float32" else 2
    return Job(
        config.model,
        request.data.seq_length,
        batch,
        weight_bytes,
        cluster,
        block_state_bytes=request.optim.state_bytes(of_blocks=True),
        end_state_bytes=request.optim.state_bytes(of_blocks=False),
        is_orthogonalized=request.optim.optimizer == MUON,
        offloads_optimizer=config.parallel.offloads_optimizer,
        head_share=config.head_share,
        division=Division.of(request.parallel),
        overlaps_messages=request.parallel.overlap_grad_reduce,
        bucket_elements=request.parallel.bucket_elements,
    )


def layout_of(request: RunRequest, devices: int) -> Layout:
    """The layout of a request on a number of devices; a remainder that forms no whole replica is unused."""
    parallel, layers = request.parallel, request.model.num_layers
    dp = max(1, devices // parallel.replica_size)
    micro, batch = batch_sizes(request.optim, dp)
    recompute = request.recompute
    kind = BLOCKS if recompute.checkpoint_activations else ATTENTION if recompute.recomputes_attention else NOTHING
    return Layout(
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.ring_size,
        ulysses=parallel.ulysses_size,
        ep=parallel.expert_model_parallel_size if request.model.num_experts > 1 else 1,
        pp=parallel.pipeline_model_parallel_size,
        dp=dp,
        splits_sequence=parallel.splits_sequence,
        schedule=parallel.schedule_for(layers),
        chunks=parallel.chunks_for(layers),
        zero=parallel.zero_stage,
        recompute=kind,
        micro_batch=micro,
        micro_batches=max(1, batch // (micro * dp)),
        keeps_experts_whole=parallel.expert_tensor_parallel_size == 1,
    )


def layout_problems(arguments: Sequence[str], devices: int, program: Program) -> Callable[[Layout], Sequence[str]]:
    """Returns a function that validates the flags of a layout in a command line."""

    @cache
    def problems(layout: Layout) -> Sequence[str]:
        # A single chunk too: it overrides the command line.
        draft = read_flags([*arguments, *layout.flags(), _VIRTUAL, str(layout.chunks)], program=program)
        return draft.problems or world_problems(draft.request(), devices) or _file_problems(layout)

    return problems


def _file_problems(layout: Layout) -> Sequence[str]:
    """Mismatches of a layout and its schedule file."""
    if is_schedule_file(layout.schedule):
        try:
            build_schedule(layout.schedule, layout.pp, layout.chunks, layout.micro_batches)
        except ConfigError as failure:
            return failure.problems
    return ()


def without_fields(arguments: Sequence[str], fields: frozenset[str]) -> list[str]:
    """A command line without the flags that set these fields ("section.field")."""
    return [part for written, meant in flags_with_fields(arguments) if not meant & fields for part in written]


def plan_request(arguments: Sequence[str], request: RunRequest) -> tuple[LayoutPlan, Callable[[Layout], Sequence[str]]]:
    """The plan of a command line, with the given layout flags fixed; see `read_plan_request`."""
    cluster = cluster_of(request)
    arguments = without_fields(arguments, _SEQUENCE_FLAGS)
    job, problems = job_of(request, cluster), layout_problems(arguments, cluster.devices, request.program)
    requested = layout_of(request, cluster.devices)
    given = [field for field in _FIXED if request.provenance.get(field) == GIVEN]
    fixed = {_FIXED[field]: getattr(requested, _FIXED[field]) for field in given}
    fixed = _otherwise_fixed(request, requested, fixed) | fixed
    if request.parallel.sequence_parallel and "tp" not in fixed:  # no effect with tp 1
        fixed.pop("splits_sequence", None)
    plan = search(job, problems, fixed)
    if not plan.considered:
        sizes = [(field.split(".")[1], attrgetter(field)(request)) for field in given]
        flags = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in sizes)
        passes = f" for {fixed['micro_batches']} micro-batches" if "micro_batches" in fixed else ""
        raise ConfigError(
            f"No layout of {cluster.devices:,} devices and --global-batch-size {job.global_batch:,} satisfies "
            f"{flags or 'the sizes of the network'}{passes}. Drop a flag, or use another --global-batch-size."
        )
    return plan, problems


def _otherwise_fixed(request: RunRequest, requested: Layout, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a layout fixed by other flags of sequences and pipelines, and by a schedule file.

    Args:
        fixed: the attributes fixed by `_FIXED`.

    Raises:
        ConfigError: the schedule file contradicts them.
    """
    parallel, more = request.parallel, dict[str, Any]()
    if parallel.cp_comm_type != RING:
        more |= {"cp": requested.cp, "ulysses": requested.ulysses}
    if parallel.enable_zbh1_pipeline:
        more["schedule"] = requested.schedule
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        layers = request.model.num_layers + sum(parallel.counted_ends)
        more["all_chunks"] = layers // parallel.num_layers_per_virtual_pipeline_stage
    if is_schedule_file(requested.schedule):
        placement, passes, _ = read_orders(requested.schedule)
        sizes = {"pp": placement.ranks, "chunks": len(placement.chunks_of(0)), "micro_batches": passes}
        build_schedule(requested.schedule, *({**sizes, **fixed}[name] for name in sizes))
        more |= {"schedule": requested.schedule, **sizes}
    return more


def _fastest(
    arguments: Sequence[str], request: RunRequest, job: Job, count: int = 10, below_bytes: float | None = None
) -> tuple[LayoutPlan, Callable[[Layout], Sequence[str]]]:
    """The plan of a command line, with only the attributes of a schedule file fixed."""
    arguments = without_fields(arguments, _SEQUENCE_FLAGS | _PIPELINE_FLAGS)
    problems = layout_problems(arguments, job.cluster.devices, request.program)
    free = read_flags(arguments, program=request.program).unchecked()
    fixed = _otherwise_fixed(free, layout_of(free, job.cluster.devices), {})
    return search(job, problems, fixed, count, below_bytes), problems


def request_lines(argv: Sequence[str], command: Sequence[str]) -> Iterator[str]:
    """Formats the plan of a command line, with its layout flags fixed.

    Args:
        command: program and flags of the printed command; the layout is appended.

    Raises:
        ConfigError: all problems of the command line.
    """
    arguments, request = read_plan_request(argv)
    plan, problems = plan_request(arguments, request)
    tokens, price = request.optim.train_tokens, request.planning.device_hour_price
    command = [command[0], *without_fields(command[1:], _SEQUENCE_FLAGS)]
    yield from plan_lines(plan, problems, command, tokens, price)


def command_lines(argv: Sequence[str], program: Program, devices: int, command: Sequence[str]) -> Iterator[str]:
    """Formats the estimate of a command line, then the fastest layouts.

    Args:
        devices: the world size.

    Raises:
        ConfigError: all problems of the command line.
    """
    arguments, request = read_plan_request(argv, program)
    cluster = cluster_of(request, devices)
    layout = layout_of(request, cluster.devices)
    mismatches = world_problems(request, cluster.devices) or _file_problems(layout)
    if mismatches:
        raise ConfigError(mismatches)
    job = dataclasses.replace(job_of(request, cluster), global_batch=layout.global_batch)
    present, (plan, problems) = estimate(job, layout), _fastest(arguments, request, job)
    tokens, price = request.optim.train_tokens, request.planning.device_hour_price
    yield f"this command, {'which fits' if present.fits else 'which does not fit'}:"
    yield from detail_lines(present, tokens, price)
    yield ""
    command = [command[0], *without_fields(command[1:], _SEQUENCE_FLAGS | _PIPELINE_FLAGS)]
    yield from plan_lines(plan, problems, command, tokens, price)


def next_fitting(
    arguments: Sequence[str], request: RunRequest, cluster: Cluster
) -> tuple[LayoutEstimate, LayoutEstimate | None]:
    """The estimate of a run, and the best layout that takes less memory and fits."""
    job, layout = job_of(request, cluster), layout_of(request, cluster.devices)
    job = dataclasses.replace(job, global_batch=layout.global_batch)
    present = estimate(job, layout)
    plan, _ = _fastest(arguments, request, job, count=1, below_bytes=present.memory.total)
    return present, next(iter(plan.best), None)
