"""`--elastic`: replaces a layout that does not fit the number of processes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from megatron.config.rules.checking import world_problems
from megatron.config.rules.layout import divisors, nearest_layouts
from megatron.config.run_config import RunRequest
from megatron.config.sections.parallel import RING, ParallelRequest
from megatron.config.sections.pipelines import is_schedule_file
from megatron.errors import ConfigError


def fit_layout(request: RunRequest, world_size: int) -> tuple[RunRequest, Sequence[str]]:
    """Replaces the layout of an --elastic run that does not fit this many processes; other requests are returned as is.

    Tensor parallelism is kept if a legal layout has it, else pipeline parallelism, else the nearest layout is taken.
    The global batch, and therefore the losses, stay the same. If no layout divides it into whole micro-batches, they
    are made smaller. Another number of stages keeps the chunks per rank; a single stage has neither schedule nor
    chunks.

    Returns:
        The request, and notices for the user.

    Raises:
        ConfigError: no layout is legal.
    """
    optim = request.optim
    if not request.parallel.elastic or not world_problems(request, world_size):
        return request, ()
    fitting = _legal_request(request, world_size)
    if fitting is not None:
        return fitting, (_choice_notice(request, fitting, world_size),)
    fewer = next((size for size in range(world_size - 1, 0, -1) if _legal_request(request, size) is not None), None)
    if fewer is None:
        raise ConfigError(
            f"--elastic finds no layout for {world_size} {_processes(world_size)}, nor for fewer. Drop --elastic to "
            "see what the requested layout violates."
        )
    raise ConfigError(
        f"--elastic finds no layout for {world_size} processes that divides --global-batch-size "
        f"{optim.global_batch_size}, {request.model.num_attention_heads} heads and {request.model.num_layers} layers. "
        f"Start {fewer} processes, or use a global batch with more divisors."
    )


def _legal_request(request: RunRequest, world_size: int) -> RunRequest | None:
    """The request with the most preferred layout that is legal."""
    requested, micro = request.parallel, request.optim.micro_batch_size
    micro_sizes: Sequence[int | None] = [None] if micro is None else divisors(micro)[::-1]
    unsplit = _with_whole_sequences(request)
    for size in micro_sizes:
        for tp, pp in _preferred(
            world_size, requested.tensor_model_parallel_size, requested.pipeline_model_parallel_size
        ):
            for candidate in (
                _with_layout(request, world_size, tp, pp, size),
                _with_layout(unsplit, world_size, tp, pp, size),
            ):
                if candidate is not None and not world_problems(candidate, world_size):
                    return candidate
    return None


def _preferred(world_size: int, tp_size: int, pp_size: int) -> Iterator[tuple[int, int]]:
    """The layouts of a world in order of preference."""
    nearest = nearest_layouts(world_size, tp_size, pp_size)
    yield from sorted(nearest, key=lambda pair: (pair[0] != tp_size, pair[1] != pp_size))


def _with_layout(
    request: RunRequest, world_size: int, tp_size: int, pp_size: int, micro: int | None
) -> RunRequest | None:
    """The request with another layout; None if a rule between its flags forbids it."""
    try:
        parallel = _with_stages(request.parallel, request.model.num_layers, pp_size)
        expert_tp = None if parallel.splits_each_expert else parallel.expert_tensor_parallel_size
        parallel = dataclasses.replace(
            parallel, tensor_model_parallel_size=tp_size, expert_tensor_parallel_size=expert_tp if tp_size > 1 else None
        )
        ranks = world_size // (pp_size * (tp_size if parallel.splits_each_expert else 1))
        experts = math.gcd(parallel.expert_model_parallel_size, ranks)
        parallel = dataclasses.replace(parallel, expert_model_parallel_size=experts)
        optim = dataclasses.replace(request.optim, micro_batch_size=micro)
        return dataclasses.replace(request, parallel=parallel, optim=optim)
    except ConfigError:
        return None


def _with_stages(parallel: ParallelRequest, num_layers: int, pp_size: int) -> ParallelRequest:
    """Keeps the schedule and the chunks per rank; a single stage has neither."""
    if pp_size == parallel.pipeline_model_parallel_size:
        return parallel
    name, chunks = parallel.pipeline_schedule, parallel.chunks_for(num_layers)
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        chunks = min(chunks, num_layers // pp_size)
    return dataclasses.replace(
        parallel,
        pipeline_model_parallel_size=pp_size,
        # a schedule file is written for one number of stages
        pipeline_schedule=None if pp_size == 1 or is_schedule_file(name) else name,
        enable_zbh1_pipeline=parallel.enable_zbh1_pipeline and pp_size > 1,
        virtual_pipeline_model_parallel_size=chunks if pp_size > 1 and chunks > 1 else None,
        num_layers_per_virtual_pipeline_stage=None,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
    )


def _with_whole_sequences(request: RunRequest) -> RunRequest:
    """The request with each sequence on one rank."""
    parallel = dataclasses.replace(
        request.parallel,
        context_parallel_size=1,
        cp_comm_type=RING,
        hierarchical_context_parallel_sizes=(),
        ds_sequence_parallel_size=1,
    )
    return dataclasses.replace(request, parallel=parallel)


def _choice_notice(requested: RunRequest, chosen: RunRequest, world_size: int) -> str:
    before, after = requested.parallel, chosen.parallel
    kept = [
        name
        for name, is_kept in (
            ("tensor", before.tensor_model_parallel_size == after.tensor_model_parallel_size),
            ("pipeline", before.pipeline_model_parallel_size == after.pipeline_model_parallel_size),
        )
        if is_kept
    ]
    reason = f"it keeps the {' and '.join(kept)} size" if kept else "it is the nearest legal layout"
    sequence = f" x {after.sequence_size} sequence" if before.sequence_size > 1 else ""
    micro = chosen.optim.micro_batch_size
    smaller = f"; --micro-batch-size becomes {micro}" if micro != requested.optim.micro_batch_size else ""
    schedule = after.schedule_for(chosen.model.num_layers)
    changed = schedule != before.schedule_for(requested.model.num_layers)
    scheduled = (
        f"; the pipeline schedule becomes {schedule}" if changed and after.pipeline_model_parallel_size > 1 else ""
    )
    return (
        f"--elastic: {before.tensor_model_parallel_size} tensor x {before.pipeline_model_parallel_size} pipeline ranks "
        f"do not fit {world_size} {_processes(world_size)}; using {after.tensor_model_parallel_size} x "
        f"{after.pipeline_model_parallel_size} x {world_size // after.replica_size} data{sequence}: {reason}. The "
        f"global batch stays {chosen.optim.global_batch_size}{smaller}{scheduled}."
    )


def _processes(count: int) -> str:
    return "process" if count == 1 else "processes"
