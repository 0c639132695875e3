"""From a command line to a plan: what is planned, for which devices, and what the rules of flags say of a layout."""

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
from megatron.config.sections.parallel import RING
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

USUAL_VOCABULARY = 50257
_DEVICES_PER_NODE = 8
# A plan needs no data, no tokenizer and no schedule: what is said where a required flag is missing.
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
# The attributes of a layout that a flag fixes.
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
_VIRTUAL = "--virtual-pipeline-model-parallel-size"
# Other names for what the flags of a layout say, which would contradict them: of sequences, and of pipelines.
_SEQUENCE_WORDS = frozenset({"parallel.cp_comm_type", "parallel.hierarchical_context_parallel_sizes"})
_PIPELINE_WORDS = frozenset(
    {
        "parallel.pipeline_schedule",
        "parallel.enable_zbh1_pipeline",
        "parallel.virtual_pipeline_model_parallel_size",
        "parallel.num_layers_per_virtual_pipeline_stage",
    }
)


def read_planned(argv: Sequence[str], program: Program = NO_PROGRAM) -> tuple[list[str], RunRequest]:
    """What a command line says of which data, tokenizer and batches may be missing, and the words that say so.

    Raises:
        ConfigError: with all that is wrong with it beside that.
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
    words = [*argv, *(word for pair in missing.items() for word in pair)]
    request = read_flags(words, program=program).request()
    return words, dataclasses.replace(request, provenance=draft.run.provenance)


def cluster_of(request: RunRequest, devices: int | None = None) -> Cluster:
    """The devices that a request is planned for.

    Args:
        devices: how many, if the request does not say.

    Raises:
        ConfigError: a name is unknown, or the nodes do not divide the devices.
    """
    asked = request.planning
    count = asked.planned_devices or devices or _DEVICES_PER_NODE
    per_node = min(count, _DEVICES_PER_NODE)
    if asked.nodes is not None:
        if count % asked.nodes:
            raise ConfigError(f"--nodes {asked.nodes} does not divide {count} devices. Use a divisor of {count}.")
        per_node = count // asked.nodes
    name = asked.interconnect
    links = links_of_device(asked.planned_device) if name is None else links_of(name)
    return Cluster(device_of(asked.planned_device), links, count, per_node)


def job_of(request: RunRequest, cluster: Cluster) -> Job:
    """What a request trains: a step of one sample a device where it names no global batch, or of those of a schedule's
    file.

    Raises:
        ConfigError: the request cannot be resolved.
    """
    vocabulary = request.model.vocab_size or USUAL_VOCABULARY
    batch = request.optim.global_batch_size
    if batch is None:
        batch = (request.optim.micro_batch_size or 1) * cluster.devices
        if is_schedule_file(request.parallel.pipeline_schedule):
            placement, passes, _ = read_orders(request.parallel.pipeline_schedule or "")
            batch = max(1, batch // placement.ranks) * passes
    # Resolved as one process would: the sizes of the network do not depend on the layout but for padding.
    parallel = dataclasses.replace(
        request.parallel,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        ds_sequence_parallel_size=1,
        cp_comm_type=RING,
        hierarchical_context_parallel_sizes=(),
        pipeline_schedule=None,
        virtual_pipeline_model_parallel_size=None,
        num_layers_per_virtual_pipeline_stage=None,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
    )
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
    )


def layout_of(request: RunRequest, devices: int) -> Layout:
    """The layout that a request asks for on this many devices, of which its replicas take a whole part."""
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


def rules_of(words: Sequence[str], devices: int, program: Program) -> Callable[[Layout], Sequence[str]]:
    """What the rules of flags say of a layout, for a command line."""

    @cache
    def problems(layout: Layout) -> Sequence[str]:
        # A single chunk as well: the command line may ask for others.
        draft = read_flags([*words, *layout.words(), _VIRTUAL, str(layout.chunks)], program=program)
        return draft.problems or world_problems(draft.request(), devices) or _file_problems(layout)

    return problems


def _file_problems(layout: Layout) -> Sequence[str]:
    """Why a schedule of a file is not one of this layout."""
    if is_schedule_file(layout.schedule):
        try:
            build_schedule(layout.schedule, layout.pp, layout.chunks, layout.micro_batches)
        except ConfigError as failure:
            return failure.problems
    return ()


def without_fields(words: Sequence[str], fields: frozenset[str]) -> list[str]:
    """A command line without the flags that set one of these fields, by "section.field"."""
    return [word for written, meant in flags_with_fields(words) if not meant & fields for word in written]


def planned(words: Sequence[str], request: RunRequest) -> tuple[LayoutPlan, Callable[[Layout], Sequence[str]]]:
    """The plan of a command line whose flags of the layout are taken as given.

    Args:
        words: the command line, with placeholders for what a plan does not need.
        request: what it says.
    """
    cluster = cluster_of(request)
    words = without_fields(words, _SEQUENCE_WORDS)
    job, problems = job_of(request, cluster), rules_of(words, cluster.devices, request.program)
    own = layout_of(request, cluster.devices)
    given = [place for place in _FIXED if request.provenance.get(place) == GIVEN]
    fixed = {_FIXED[place]: getattr(own, _FIXED[place]) for place in given}
    fixed = _fixed_elsewhere(request, own, fixed) | fixed
    if request.parallel.sequence_parallel and "tp" not in fixed:  # on one rank there is nothing to split
        fixed.pop("splits_sequence", None)
    plan = search(job, problems, fixed)
    if not plan.considered:
        sizes = [(place.split(".")[1], attrgetter(place)(request)) for place in given]
        flags = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in sizes)
        passes = f" for {fixed['micro_batches']} micro-batches" if "micro_batches" in fixed else ""
        raise ConfigError(
            f"No layout of {cluster.devices:,} devices and --global-batch-size {job.global_batch:,} has what is given "
            f"by {flags or 'the sizes of the network'}{passes}. Drop a flag, or use another --global-batch-size."
        )
    return plan, problems


def _fixed_elsewhere(request: RunRequest, own: Layout, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """What else is fixed by flags of sequences and of pipelines, and by the file of a schedule.

    Args:
        fixed: what is given by flags of a layout's own.

    Raises:
        ConfigError: the file of a schedule is for something else.
    """
    parallel, more = request.parallel, dict[str, Any]()
    if parallel.cp_comm_type != RING:
        more |= {"cp": own.cp, "ulysses": own.ulysses}
    if parallel.enable_zbh1_pipeline:
        more["schedule"] = own.schedule
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        layers = request.model.num_layers + sum(parallel.counted_ends)
        more["all_chunks"] = layers // parallel.num_layers_per_virtual_pipeline_stage
    if is_schedule_file(own.schedule):
        placement, passes, _ = read_orders(own.schedule)
        of_file = {"pp": placement.ranks, "chunks": len(placement.chunks_of(0)), "micro_batches": passes}
        build_schedule(own.schedule, *({**of_file, **fixed}[name] for name in of_file))
        more |= {"schedule": own.schedule, **of_file}
    return more


def _fastest(
    words: Sequence[str], request: RunRequest, job: Job, count: int = 10, below_bytes: float | None = None
) -> tuple[LayoutPlan, Callable[[Layout], Sequence[str]]]:
    """The plan of a command line whose flags of the layout may all change, but for those that are given in a file."""
    words = without_fields(words, _SEQUENCE_WORDS | _PIPELINE_WORDS)
    problems = rules_of(words, job.cluster.devices, request.program)
    free = read_flags(words, program=request.program).unchecked()
    fixed = _fixed_elsewhere(free, layout_of(free, job.cluster.devices), {})
    return search(job, problems, fixed, count, below_bytes), problems


def request_lines(argv: Sequence[str], command: Sequence[str]) -> Iterator[str]:
    """The plan of a command line as text, whose flags of the layout are kept.

    Args:
        command: the words that the command of the first layout begins with, the program's name first.

    Raises:
        ConfigError: with all that is wrong with the command line.
    """
    words, request = read_planned(argv)
    plan, problems = planned(words, request)
    tokens, price = request.optim.train_tokens, request.planning.device_hour_price
    command = [command[0], *without_fields(command[1:], _SEQUENCE_WORDS)]
    yield from plan_lines(plan, problems, command, tokens, price)


def own_lines(argv: Sequence[str], program: Program, devices: int, command: Sequence[str]) -> Iterator[str]:
    """What a command line would take as it is, then the fastest layouts.

    Args:
        devices: the processes that were started.

    Raises:
        ConfigError: with all that is wrong with the command line.
    """
    words, request = read_planned(argv, program)
    cluster = cluster_of(request, devices)
    layout = layout_of(request, cluster.devices)
    misfits = world_problems(request, cluster.devices) or _file_problems(layout)
    if misfits:
        raise ConfigError(misfits)
    job = dataclasses.replace(job_of(request, cluster), global_batch=layout.global_batch)
    own, (plan, problems) = estimate(job, layout), _fastest(words, request, job)
    tokens, price = request.optim.train_tokens, request.planning.device_hour_price
    yield f"this command, {'which fits' if own.fits else 'which does not fit'}:"
    yield from detail_lines(own, tokens, price)
    yield ""
    command = [command[0], *without_fields(command[1:], _SEQUENCE_WORDS | _PIPELINE_WORDS)]
    yield from plan_lines(plan, problems, command, tokens, price)


def next_that_fits(
    words: Sequence[str], request: RunRequest, cluster: Cluster
) -> tuple[LayoutEstimate, LayoutEstimate | None]:
    """What a run takes that ran out of memory, and the first in a plan of those that take less and fit."""
    job, layout = job_of(request, cluster), layout_of(request, cluster.devices)
    job = dataclasses.replace(job, global_batch=layout.global_batch)
    own = estimate(job, layout)
    plan, _ = _fastest(words, request, job, count=1, below_bytes=own.memory.total)
    return own, next(iter(plan.best), None)
