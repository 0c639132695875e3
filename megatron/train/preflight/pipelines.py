"""Whether a pipeline schedule from a file fits the run and can end."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.run_config import RunRequest
from megatron.config.schedule import batch_sizes
from megatron.config.sections.pipelines import is_schedule_file
from megatron.errors import ConfigError
from megatron.parallel.schedule.building import build_schedule


def schedule_problems(request: RunRequest, world_size: int) -> Iterator[str]:
    """What is wrong with the file of a schedule; named schedules take any number of micro-batches.

    Args:
        request: flags without a problem, whose batch sizes and layout fit the world.
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
            f"--compile cannot be combined with --pipeline-schedule {name}, which has I and W: the program of a block "
            "computes the gradients of weights together with those of inputs. Write B for both, or drop --compile."
        )
