"""Layouts: legal tensor and pipeline sizes, and the nearest legal layouts to propose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from megatron.config.rules.rule import run_rule, world_rule
from megatron.config.run_sections import RunSections

_MOST_SHOWN = 8


@run_rule
def _heads_and_widths(run: RunSections) -> Iterator[str]:
    model, parallel, ranks = run.model, run.parallel, run.parallel.tensor_model_parallel_size
    if model.num_attention_heads > 0 and ranks > 0:
        yield from heads_problems(model.num_attention_heads, ranks)
    if ranks > 0:
        widths = dict(model.widths)
        if not parallel.splits_each_expert:
            widths.pop("--moe-ffn-hidden-size", None)
            if not model.mtp_num_layers:
                widths.pop("--hidden-size", None)
        yield from widths_problems(widths, ranks)


@run_rule
def _gradient_messages(run: RunSections) -> Iterator[str]:
    parallel, width = run.parallel, run.model.hidden_size
    if parallel.ddp_bucket_size is not None and 0 < parallel.ddp_bucket_size < width:
        yield (
            f"--ddp-bucket-size {parallel.ddp_bucket_size} is smaller than a row of --hidden-size {width}. Use "
            f"--ddp-bucket-size {width} or more; the default is 40 million."
        )
    if parallel.ddp_reduce_scatter_with_fp32_accumulation:
        flag = "--ddp-reduce-scatter-with-fp32-accumulation"
        if parallel.zero_stage == 3:
            yield f"{flag} cannot be combined with --zero-stage 3, whose gradients DeepSpeed sums. Drop it."
        if run.precision.dtype_name == "float32":
            yield f"{flag} requires --bf16 or --fp16: without them, gradients are sent in float32. Drop it."


@run_rule
def _padded_vocabulary(run: RunSections) -> Iterator[str]:
    parallel = run.parallel
    size, divisor, ranks = (
        parallel.pad_vocab_size_to,
        parallel.make_vocab_size_divisible_by,
        parallel.tensor_model_parallel_size,
    )
    if size is not None and divisor > 0 and size % divisor:
        yield (
            f"--pad-vocab-size-to: {size} is not divisible by {divisor} (--make-vocab-size-divisible-by). Use "
            f"--pad-vocab-size-to {-(-size // divisor) * divisor} or another divisor."
        )
    if size is not None and ranks > 0 and size % ranks:
        yield (
            f"--pad-vocab-size-to: {size} is not divisible by {ranks} (--tensor-model-parallel-size), so the word "
            f"embedding cannot be split evenly. Use --pad-vocab-size-to {-(-size // ranks) * ranks}."
        )


@run_rule
def _elastic(run: RunSections) -> Iterator[str]:
    if run.parallel.elastic and run.optim.global_batch_size is None:
        yield "--elastic requires --global-batch-size, which it keeps while the number of replicas changes."


@run_rule
def _plan_or_dry_run(run: RunSections) -> Iterator[str]:
    if run.planning.plan_only and run.planning.dry_run_ranks is not None:
        yield "--plan-only cannot be combined with --dry-run-ranks. Drop one of them."


@world_rule
def _layout(run: RunSections, world_size: int) -> Iterator[str]:
    model, parallel = run.model, run.parallel
    yield from layout_problems(
        world_size,
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        sequence_size=parallel.sequence_size,
        split_sizes=(model.num_attention_heads, *model.widths.values()),
        most_stages=parallel.most_stages(model.num_layers),
    )


def layout_problems(
    world_size: int,
    tp_size: int,
    pp_size: int,
    *,
    sequence_size: int = 1,
    split_sizes: Sequence[int] = (),
    most_stages: int | None = None,
) -> Iterator[str]:
    """The world must consist of whole replicas of tp x pp x sequence ranks.

    Args:
        sequence_size: ranks that share each sequence.
        split_sizes: sizes that tensor parallelism divides (attention heads, MLP hidden size); proposed layouts divide
            all of them.
        most_stages: the largest pipeline to propose.
    """
    needed = tp_size * pp_size * sequence_size
    copies, rest = divmod(world_size, needed)
    if rest == 0 and copies > 0:
        return
    counts = f"{needed}" if copies == 0 else f"{copies * needed} or {(copies + 1) * needed}"
    if world_size % (tp_size * pp_size) == 0:
        most = max(size for size in divisors(world_size // (tp_size * pp_size)) if size <= sequence_size)
        yield (
            f"{sequence_size} ranks per sequence (--context-parallel-size, --ds-sequence-parallel-size) x tensor "
            f"{tp_size} x pipeline {pp_size} require a multiple of {needed} processes, but this run has {world_size}. "
            f"Use {counts}, or {most} per sequence."
        )
        return
    sharing = max(size for size in divisors(world_size) if size <= sequence_size)
    nearest = nearest_layouts(world_size // sharing, tp_size, pp_size, split_sizes=split_sizes, most_stages=most_stages)
    fewer = f"{sharing} per sequence and " if sharing < sequence_size else ""
    shown = ", ".join(f"{tp} x {pp}" for tp, pp in nearest[:_MOST_SHOWN])
    hidden = f" or {len(nearest) - _MOST_SHOWN} others" if len(nearest) > _MOST_SHOWN else ""
    shared = f", {sequence_size} per sequence" if sequence_size > 1 else ""
    yield (
        f"--tensor-model-parallel-size {tp_size} x --pipeline-model-parallel-size {pp_size} requires a multiple of "
        f"{needed} processes{shared}, but this run has {world_size}. Use {counts}, or {fewer}a tensor x pipeline "
        f"layout that fits {world_size}: {shown}{hidden}."
    )


def nearest_layouts(
    world_size: int, tp_size: int, pp_size: int, *, split_sizes: Sequence[int] = (), most_stages: int | None = None
) -> list[tuple[int, int]]:
    """All legal (tp, pp) of a world, sorted by the ratio of their sizes to the requested ones."""
    legal = [
        (tp, pp)
        for tp in divisors(world_size)
        for pp in divisors(world_size // tp)
        if all(size % tp == 0 for size in split_sizes) and (most_stages is None or pp <= most_stages)
    ]
    return sorted(legal, key=lambda pair: (_ratio(pair[0], tp_size) * _ratio(pair[1], pp_size), pair))


def heads_problems(heads: int, tp_size: int) -> Iterator[str]:
    """Every tensor-parallel rank must get the same number of attention heads; key/value heads may be replicated."""
    if heads % tp_size == 0:
        return
    yield (
        f"{heads} attention head{'s' * (heads != 1)} cannot be split over {tp_size} ranks (--num-attention-heads "
        f"{heads}, --tensor-model-parallel-size {tp_size}). Heads must be a multiple of the ranks; use one of "
        f"{', '.join(map(str, divisors(heads)))} rank{'s' * (heads != 1)}, or {-(-heads // tp_size) * tp_size} heads."
    )


def widths_problems(widths: Mapping[str, int], tp_size: int) -> Iterator[str]:
    """Every tensor-parallel rank must get an equal share of each width.

    Args:
        widths: the MLP widths by flag.
    """
    for flag, width in widths.items():
        if width % tp_size:
            yield (
                f"{flag} {width} is not divisible by --tensor-model-parallel-size {tp_size}. Use {flag} "
                f"{-(-width // tp_size) * tp_size}."
            )


def stages_problems(num_layers: int, stages: int) -> Iterator[str]:
    """Every pipeline stage must get a layer."""
    if num_layers >= stages:
        return
    yield (
        f"{num_layers} layer{'s' * (num_layers != 1)} cannot fill {stages} pipeline stages (--num-layers {num_layers}, "
        f"--pipeline-model-parallel-size {stages}). Every stage needs a layer; use at most {num_layers} "
        f"stage{'s' * (num_layers != 1)}."
    )


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _ratio(left: int, right: int) -> float:
    return max(left, right) / min(left, right)
