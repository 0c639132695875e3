"""Checks of pipeline schedules from files."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.run_config import RunRequest
from megatron.config.schedule import batch_sizes
from megatron.config.sections.pipelines import is_schedule_file
from megatron.errors import ConfigError
from megatron.parallel.schedule.building import build_schedule


def schedule_problems(request: RunRequest, world_size: int) -> Iterator[str]:
    """Problems with the file of a schedule; named schedules take any number of micro-batches.

    Args:
        request: valid flags, whose batch sizes and layout match the world size.
    """
    parallel, optim, layers = request.parallel, request.optim, request.model.num_layers
    name = parallel.schedule_for(layers)
    if not is_schedule_file(name):
        return
    replicas = world_size // parallel.replica_size
    micro, batch = batch_sizes(optim, replicas)
    try:
        schedule = build_schedule(
            name, parallel.pipeline_model_parallel_size, parallel.chunks_for(layers), batch // (micro * replicas)
        )
    except ConfigError as failure:
        yield from failure.problems
        return
    if request.kernels.compile and schedule.splits_backward:
        yield (
            f"--compile cannot be combined with --pipeline-schedule {name}, which has I and W: a compiled block "
            "computes the gradients of inputs and weights together. Use B instead of I and W, or drop --compile."
        )
