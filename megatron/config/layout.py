"""Which tensor and pipeline sizes are legal: the rules, their refusals, and the nearest layouts that keep them.

A rule yields one sentence if it is broken and nothing otherwise. Sizes of ranks and stages are at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

_MOST_SHOWN = 8


def layout_problems(
    world_size: int,
    tp_size: int,
    pp_size: int,
    *,
    sequence_size: int = 1,
    split_sizes: Sequence[int] = (),
    most_stages: int | None = None,
) -> Iterator[str]:
    """Whole replicas, tp x pp ranks for each part of a sequence, must fill the world.

    Args:
        sequence_size: ranks that share each sequence.
        split_sizes: what tensor parallelism divides (attention heads, width of the feed-forward network); proposed
            layouts divide all of it.
        most_stages: the largest pipeline that may be proposed.
    """
    needed = tp_size * pp_size * sequence_size
    copies, rest = divmod(world_size, needed)
    if rest == 0 and copies > 0:
        return
    counts = f"{needed}" if copies == 0 else f"{copies * needed} or {(copies + 1) * needed}"
    started = f"{world_size} {'was' if world_size == 1 else 'were'} started"
    if world_size % (tp_size * pp_size) == 0:
        most = max(size for size in divisors(world_size // (tp_size * pp_size)) if size <= sequence_size)
        yield (
            f"{sequence_size} ranks share each sequence (--context-parallel-size, --ds-sequence-parallel-size), each "
            f"of them tensor x pipeline = {tp_size} x {pp_size} processes, which needs a multiple of {needed} "
            f"processes, and {started}. Start {counts}, or let {most} share one."
        )
        return
    sharing = max(size for size in divisors(world_size) if size <= sequence_size)
    nearest = nearest_layouts(world_size // sharing, tp_size, pp_size, split_sizes=split_sizes, most_stages=most_stages)
    fewer = f"let {sharing} share each sequence and " if sharing < sequence_size else ""
    shown = ", ".join(f"{tp} x {pp}" for tp, pp in nearest[:_MOST_SHOWN])
    hidden = f" or {len(nearest) - _MOST_SHOWN} others" if len(nearest) > _MOST_SHOWN else ""
    shared = f", {sequence_size} to share each sequence" if sequence_size > 1 else ""
    yield (
        f"--tensor-model-parallel-size {tp_size} x --pipeline-model-parallel-size {pp_size} needs a multiple of "
        f"{needed} processes{shared}, and {started}. Start {counts}, or {fewer}"
        f"use a tensor x pipeline layout that fits {world_size}: {shown}{hidden}."
    )


def nearest_layouts(
    world_size: int, tp_size: int, pp_size: int, *, split_sizes: Sequence[int] = (), most_stages: int | None = None
) -> list[tuple[int, int]]:
    """All legal (tp, pp) of a world, those nearest to the requested one first, measured by the ratio of the sizes."""
    legal = [
        (tp, pp)
        for tp in divisors(world_size)
        for pp in divisors(world_size // tp)
        if all(size % tp == 0 for size in split_sizes) and (most_stages is None or pp <= most_stages)
    ]
    return sorted(legal, key=lambda pair: (_ratio(pair[0], tp_size) * _ratio(pair[1], pp_size), pair))


def heads_problems(heads: int, tp_size: int) -> Iterator[str]:
    """Every tensor-parallel rank must get the same number of attention heads; groups of keys and values may be
    replicated.
    """
    if heads % tp_size == 0:
        return
    yield (
        f"{heads} attention head{'s' * (heads != 1)} cannot be split over {tp_size} ranks (--num-attention-heads "
        f"{heads}, --tensor-model-parallel-size {tp_size}). Heads must be a multiple of the ranks; use one of "
        f"{', '.join(map(str, divisors(heads)))} rank{'s' * (heads != 1)}, or {-(-heads // tp_size) * tp_size} heads."
    )


def widths_problems(widths: Mapping[str, int], tp_size: int) -> Iterator[str]:
    """Every tensor-parallel rank must get an equal share of each inner width.

    Args:
        widths: the inner widths of the feed-forward layers, by flag.
    """
    for flag, width in widths.items():
        if width % tp_size:
            yield (
                f"{flag} {width} cannot be split over --tensor-model-parallel-size {tp_size} ranks. It must be a "
                f"multiple of them; use {flag} {-(-width // tp_size) * tp_size}."
            )


def stages_problems(num_layers: int, stages: int) -> Iterator[str]:
    """Every pipeline stage must get a layer; one without would only pass on what it is sent."""
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
