"""Pipeline parallelism: the schedule, model chunks, and support by the engine and ZeRO."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.rules.layout import divisors, stages_problems
from megatron.config.rules.rule import request_rule, run_rule
from megatron.config.run_sections import ReadFlags, RunSections
from megatron.config.sections.parallel import ParallelRequest
from megatron.config.sections.pipelines import ENGINES, SCHEDULE_CHUNKS, is_schedule_file

_VIRTUAL = "--virtual-pipeline-model-parallel-size"
_LAYERS = "--num-layers-per-virtual-pipeline-stage"
_SCHEDULE = "--pipeline-schedule"
_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"


@request_rule
def _no_pipeline(run: ReadFlags) -> Iterator[str]:
    stages = run.parallel.pipeline_model_parallel_size
    if run.values.get("legacy.no_pipeline_parallel") and stages > 1:
        yield (
            f"--no-pipeline-parallel contradicts --pipeline-model-parallel-size {stages}. Use "
            "--pipeline-model-parallel-size 1, or drop --no-pipeline-parallel."
        )


@request_rule
def _ramp_up_with_file(run: RunSections) -> Iterator[str]:
    name = run.parallel.schedule_for(run.model.num_layers)
    if is_schedule_file(name) and run.optim.rampup_batch_size is not None:
        yield (
            f"{_SCHEDULE} {name} is for a fixed number of micro-batches, which --rampup-batch-size changes. Use a "
            "named schedule, or drop --rampup-batch-size."
        )


@run_rule
def _pipeline(run: RunSections) -> Iterator[str]:
    """Yields the violations of the first group of rules that has any; none if a number is out of bounds."""
    parallel, num_layers = run.parallel, run.model.num_layers
    counts = (parallel.virtual_pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage)
    sizes = [parallel.pipeline_model_parallel_size, *(count for count in counts if count is not None)]
    if min(sizes) < 1 or parallel.pipeline_engine not in ENGINES:
        return
    problems = [*_name_problems(parallel)]
    if num_layers > 0:
        problems += _division_problems(parallel, num_layers)
    if num_layers > 0 and not problems:
        problems += _chunk_problems(parallel, num_layers)
    if not problems:
        problems += _end_problems(parallel, num_layers)
    yield from problems or _engine_problems(parallel, num_layers)


def _name_problems(parallel: ParallelRequest) -> Iterator[str]:
    name = parallel.pipeline_schedule
    if name is not None and name not in SCHEDULE_CHUNKS and not is_schedule_file(name):
        yield f"{_SCHEDULE} {name} is unknown. Use one of {', '.join(SCHEDULE_CHUNKS)}, or FILE.csv."
    elif parallel.enable_zbh1_pipeline and name not in (None, "zb-h1"):
        yield f"--enable-zbh1-pipeline contradicts {_SCHEDULE} {name}: it means zb-h1. Drop one of them."


def _division_problems(parallel: ParallelRequest, num_layers: int) -> Iterator[str]:
    """A given number of layers per chunk must divide the layers of a stage."""
    layers, stages = parallel.num_layers_per_virtual_pipeline_stage, parallel.pipeline_model_parallel_size
    if layers is None:
        return
    counted = num_layers + sum(parallel.counted_ends)
    chunks, rest = divmod(counted, stages * layers)
    if rest or not chunks:
        if counted % stages:
            way_out = f"Use {_VIRTUAL}, which divides layers as evenly as possible, or a multiple of {stages} layers"
        else:
            nearest = sorted(divisors(counted // stages), key=lambda size: (abs(size - layers), size))
            way_out = f"Use {' or '.join(map(str, nearest[:2]))}"
        yield (
            f"{_LAYERS} {layers} x --pipeline-model-parallel-size {stages} does not divide the {num_layers} "
            f"layer{'s' * (num_layers != 1)} of "
            f"--num-layers{' with embedding and output layer counted' * (counted > num_layers)}. {way_out}."
        )
    elif parallel.virtual_pipeline_model_parallel_size not in (None, chunks):
        yield (
            f"{_LAYERS} {layers} results in {chunks} chunk{'s' * (chunks != 1)} per rank, which contradicts {_VIRTUAL} "
            f"{parallel.virtual_pipeline_model_parallel_size}. Drop one of them."
        )


def _chunk_problems(parallel: ParallelRequest, num_layers: int) -> Iterator[str]:
    """The schedule must support the number of chunks, and each chunk must get a layer."""
    chunks, stages = parallel.chunks_for(num_layers), parallel.pipeline_model_parallel_size
    name = parallel.schedule_for(num_layers)
    fewest, most = SCHEDULE_CHUNKS.get(name, (1, None))
    if chunks < fewest or (most is not None and chunks > most):
        others = [other for other, (low, high) in SCHEDULE_CHUNKS.items() if low <= chunks <= (high or chunks)]
        option = "--enable-zbh1-pipeline" if parallel.enable_zbh1_pipeline else f"{_SCHEDULE} {name}"
        expected = f"{fewest}" if most else f"at least {fewest}"
        yield (
            f"{option} requires {expected} model {'chunk' if most == 1 else 'chunks'} per rank, got {chunks}. Use "
            f"{_flag_for(parallel, num_layers, fewest)}, or {_SCHEDULE} {' or '.join(others)}."
        )
    elif chunks > 1 and num_layers < stages * chunks:
        yield (
            f"{num_layers} layer{'s' * (num_layers != 1)} cannot fill {stages} pipeline stage{'s' * (stages != 1)} of "
            f"{chunks} chunks each (--num-layers {num_layers}, --pipeline-model-parallel-size {stages}, {name}). Every "
            f"chunk needs a layer; use at least {stages * chunks} layers, or fewer stages or chunks."
        )
    else:
        yield from stages_problems(num_layers, stages)


def _end_problems(parallel: ParallelRequest, num_layers: int) -> Iterator[str]:
    """Layers requested for the first and the last rank must leave enough for the others.

    Args:
        num_layers: 0 if unknown.
    """
    given = {_FIRST: parallel.decoder_first_pipeline_num_layers, _LAST: parallel.decoder_last_pipeline_num_layers}
    pinned = {name: count for name, count in given.items() if count is not None}
    counts = {
        "--account-for-embedding-in-pipeline-split": parallel.account_for_embedding_in_pipeline_split,
        "--account-for-loss-in-pipeline-split": parallel.account_for_loss_in_pipeline_split,
        f"{_LAYERS} {parallel.num_layers_per_virtual_pipeline_stage}": bool(
            parallel.num_layers_per_virtual_pipeline_stage and pinned
        ),
    }
    method = parallel.pp_partition_method
    options = [
        " ".join(f"{name} {count}" for name, count in pinned.items()),
        " ".join(name for name, is_given in counts.items() if is_given),
        f"--pp-partition-method {method}" if method is not None else "",
    ]
    options = [option for option in options if option]
    if len(options) > 1:
        yield f"{' and '.join(options)} both set the number of layers of a stage. Drop one of them."
        return
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.chunks_for(num_layers)
    if stages == 1 and options and method is None:
        yield f"{options[0]} requires --pipeline-model-parallel-size 2 or more. Drop it."
        return
    if not pinned or num_layers <= 0:
        return
    others, rest = stages - len(pinned), num_layers - sum(pinned.values())
    if min(pinned.values()) < chunks or rest < others * chunks or (rest and not others):
        most = num_layers - others * chunks
        yield (
            f"{options[0]} leaves {rest} of {num_layers} layer{'s' * (num_layers != 1)} to {others} other pipeline "
            f"{'rank' if others == 1 else 'ranks'} of {stages}, but every rank needs at least {chunks}. "
            + (f"Use {most} in total." if not others else f"Use at most {most} in total, and at least {chunks} each.")
        )


def _flag_for(parallel: ParallelRequest, num_layers: int, chunks: int) -> str:
    """The flag for this number of chunks per rank, in the form that was given if possible."""
    if parallel.num_layers_per_virtual_pipeline_stage is None:
        return f"{_VIRTUAL} {chunks}"
    layers, rest = divmod(num_layers, parallel.pipeline_model_parallel_size * chunks)
    if rest or not layers or parallel.virtual_pipeline_model_parallel_size is not None:
        return f"{_VIRTUAL} {chunks} without {_LAYERS}"
    return f"{_LAYERS} {layers}"


def _engine_problems(parallel: ParallelRequest, num_layers: int) -> Iterator[str]:
    """The engine must support the schedule and the ZeRO stage."""
    engine, stages, zero = parallel.pipeline_engine, parallel.pipeline_model_parallel_size, parallel.zero_stage
    name, chunks = parallel.schedule_for(num_layers), parallel.chunks_for(num_layers)
    if stages == 1 and chunks == 1:
        return
    if not ENGINES[engine].runs(name):
        others = [other for other, able in ENGINES.items() if able.runs(name)]
        way_out = f"--pipeline-engine {others[0]}" if others else f"{_SCHEDULE} 1f1b without virtual stages"
        yield f"--pipeline-engine {engine} does not support the pipeline schedule {name}. Use {way_out}."
        return
    if zero in ENGINES[engine].zero_stages:
        return
    others = [other for other, able in ENGINES.items() if zero in able.zero_stages and able.runs(name)]
    reason = (
        "it would gather the weights of a stage again for each micro-batch"
        if zero == 3
        else "a pipeline accumulates gradients over micro-batches, which this ZeRO stage shards"
    )
    *most, last = map(str, ENGINES[engine].zero_stages)
    lower = f"{', '.join(most)} or {last}"
    option, without = f"{_SCHEDULE} {name}", f"{_SCHEDULE} 1f1b without virtual stages"
    if stages > 1:
        option = f"--pipeline-model-parallel-size {stages}"
        without = "--pipeline-model-parallel-size 1 (--tensor-model-parallel-size may take its place)"
    yield (
        f"--zero-stage {zero} cannot be combined with {option}: {reason}. Use "
        + (f"--pipeline-engine {others[0]}, " if others else "")
        + f"--zero-stage {lower}, or {without}."
    )
