"""Searches the layouts of a job: those that fit, their speed, and the neighbours of the best."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron.config.rules.layout import divisors
from megatron.config.sections.pipelines import DEFAULT_ENGINE, ENGINES, SCHEDULE_CHUNKS
from megatron.parallel.schedule.actions import Placement
from trident.plan.job import Job
from trident.plan.layouts import ATTENTION, BLOCKS, NOTHING, Layout
from trident.plan.memory import Memory, memory_of
from trident.plan.step_time import StepTime, step_time_of

_MICRO_BATCHES = (1, 2, 4, 8, 16)
_CHUNKS = (1, 2, 4, 8)
_LEAST_TOKENS = 1024  # tokens of a sample per rank, below which context parallelism is not tried
_REFINED = 12  # layouts that are tried with every pipeline schedule; simulating one takes a while
# Fraction of the highest speed that counts as equal: the error of an estimate is larger (docs/scaling.md).
_NEARLY = 0.98


@dataclass(frozen=True)
class LayoutEstimate:
    """The estimated memory and time of a layout."""

    job: Job = field(repr=False)
    layout: Layout
    memory: Memory

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.job.cluster.device.memory_bytes

    @cached_property
    def time(self) -> StepTime:
        """Time of a step."""
        return step_time_of(self.job, self.layout)

    @property
    def tokens_per_second(self) -> float:
        """Over all devices."""
        return self.job.tokens / self.time.seconds

    @property
    def utilization(self) -> float:
        """Model FLOPs utilization: FLOPs of the step without recomputation over the devices' peak."""
        cluster = self.job.cluster
        return self.job.model_flops / self.time.seconds / cluster.devices / cluster.device.peak


def estimate(job: Job, layout: Layout) -> LayoutEstimate:
    """Estimates a layout."""
    return LayoutEstimate(job, layout, memory_of(job, layout))


@dataclass(frozen=True)
class LayoutPlan:
    """The layouts of a job that fit and are legal.

    Attributes:
        best: first the simplest within 2 % of the fastest, then by tokens per second.
        considered: number of layouts examined.
        fitting: number of layouts that fit.
        smallest: if none fits, the one with the least memory.
    """

    job: Job
    best: Sequence[LayoutEstimate]
    considered: int
    fitting: int
    smallest: LayoutEstimate | None = None


def search(
    job: Job,
    problems: Callable[[Layout], Sequence[str]],
    fixed: Mapping[str, Any],
    count: int = 10,
    below_bytes: float | None = None,
) -> LayoutPlan:
    """Ranks the layouts of a job by tokens per second, after the simplest of those nearly as fast as the best.

    Args:
        problems: validates the flags of a layout.
        fixed: fixed attributes of `Layout`; "all_chunks" is the number of chunks of all pipeline ranks.
        count: number of layouts returned.
        below_bytes: upper limit of a rank's memory; disables the slow search over other pipeline schedules.
    """
    estimates = [estimate(job, layout) for layout in layouts(job, fixed)]
    if below_bytes is not None:
        estimates = [each for each in estimates if each.memory.total < below_bytes]
    fitting = [each for each in estimates if each.fits]
    if not fitting:
        smallest = sorted(estimates, key=lambda each: each.memory.total)
        return LayoutPlan(job, (), len(estimates), 0, next(iter(_first_legal(smallest, problems, 1)), None))
    ranked = sorted(fitting, key=_rank_key)
    distinct = {dataclasses.replace(each.layout, schedule="", chunks=1): each for each in reversed(ranked)}
    refined = sorted(distinct.values(), key=_rank_key) if below_bytes is None else []
    legal = _first_legal(refined, problems, _REFINED)
    others = [estimate(job, layout) for each in legal for layout in _other_schedules(job, each.layout, fixed)]
    more = [each for each in others if each.fits and not problems(each.layout)]
    best = sorted([*_first_legal(ranked, problems, count), *more], key=_rank_key)
    near = [each for each in (*ranked, *more) if best and each.tokens_per_second >= _NEARLY * best[0].tokens_per_second]
    near.sort(key=lambda each: (_complexity(each.layout), _rank_key(each)))
    unique = list(dict.fromkeys([*_first_legal(near, problems, 1), *best]))
    return LayoutPlan(job, unique[:count], len(estimates) + len(others), len(fitting) + len(more))


def _rank_key(each: LayoutEstimate) -> tuple[float, int, int]:
    """The fastest first, then the least divided."""
    layout = each.layout
    return -round(each.tokens_per_second), layout.tp * layout.pp * layout.cp, layout.micro_batch


def _complexity(layout: Layout) -> tuple[int, ...]:
    """Complexity of a layout: axes, schedules other than 1F1B, chunks, recomputation, ZeRO."""
    axes = sum(size > 1 for size in (layout.tp, layout.cp, layout.ulysses, layout.ep, layout.pp))
    return axes, layout.schedule != "1f1b", layout.chunks, layout.recompute != NOTHING, layout.zero


def _first_legal(
    ranked: Sequence[LayoutEstimate], problems: Callable[[Layout], Sequence[str]], count: int
) -> list[LayoutEstimate]:
    return list(itertools.islice((each for each in ranked if not problems(each.layout)), count))


def layouts(job: Job, fixed: Mapping[str, Any]) -> Iterator[Layout]:
    """All layouts that divide the network, the batch and the devices evenly, with 1F1B or interleaved pipelines."""
    whole = fixed.get("keeps_experts_whole", False)
    for axes in _axes(job, fixed.get("ulysses", 1), fixed.get("cp"), keeps_experts_whole=whole):
        if any(fixed.get(name, value) != value for name, value in axes.items()):
            continue
        for chosen in _choices(job, axes, fixed):
            yield Layout(**axes, **chosen)


def _axes(job: Job, ulysses: int, ring: int | None, *, keeps_experts_whole: bool) -> Iterator[dict[str, Any]]:
    """The sizes of the axes, for given Ulysses size and division of experts.

    Args:
        ring: the requested size of `cp`, which is tried even with few tokens per rank.
    """
    model, cluster = job.model, job.cluster
    expert_sizes = divisors(math.gcd(*model.expert_counts)) if model.num_experts > 1 else [1]
    for tp in divisors(cluster.devices_per_node):
        if any(size % tp for size in (model.num_attention_heads, *model.widths.values())) or cluster.devices % tp:
            continue
        for pp in divisors(cluster.devices // tp):
            if pp > model.num_layers:
                continue
            rest, left = divmod(cluster.devices // (tp * pp), ulysses)
            if left:
                continue
            for cp in divisors(rest):
                is_short = cp != ring and job.sequence_length < cp * _LEAST_TOKENS
                if cp > 1 and (job.sequence_length % (2 * cp * tp) or is_short):
                    continue
                dp = rest // cp
                if dp > job.global_batch or job.global_batch % dp:
                    continue
                copies = rest * ulysses * (tp if keeps_experts_whole else 1)
                for ep in (size for size in expert_sizes if copies % size == 0):
                    sizes = {"tp": tp, "cp": cp, "ulysses": ulysses, "ep": ep, "pp": pp, "dp": dp}
                    yield {**sizes, "keeps_experts_whole": keeps_experts_whole}


def _choices(job: Job, axes: Mapping[str, int], fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The other attributes of a layout with these axes."""
    share, pp = job.global_batch // axes["dp"], axes["pp"]
    recomputed = (NOTHING, ATTENTION, BLOCKS) if axes["cp"] == 1 or "recompute" in fixed else (NOTHING, BLOCKS)
    stages = [each for each in (ENGINES[DEFAULT_ENGINE].zero_stages if pp > 1 else range(4)) if each or "zero" in fixed]
    divides = job.sequence_length % (axes["tp"] * axes["cp"]) == 0
    can_split = axes["tp"] > 1 and (divides or fixed.get("splits_sequence", False))  # no padding unless requested
    for micro in (fixed["micro_batch"],) if "micro_batch" in fixed else _MICRO_BATCHES:
        if share % micro:
            continue
        schedules = _schedules(fixed, pp) if pp > 1 else [(fixed.get("schedule", "1f1b"), 1)]
        schedules = [(schedule, chunks) for schedule, chunks in schedules if _divides(job, pp, chunks)]
        for (schedule, chunks), zero, recompute in itertools.product(schedules, stages, recomputed):
            chosen = {
                "splits_sequence": can_split and fixed.get("splits_sequence", True),
                "schedule": schedule,
                "chunks": chunks,
                "zero": zero,
                "recompute": recompute,
                "micro_batch": micro,
                "micro_batches": share // micro,
            }
            values = {**chosen, "all_chunks": pp * chunks}
            if all(fixed.get(name, value) == value for name, value in values.items()):
                yield chosen


def _divides(job: Job, pp: int, chunks: int) -> bool:
    """True if the blocks can be divided into these chunks, with the requested numbers of blocks."""
    return job.division.fits(job.model.num_layers, Placement.loop(pp, chunks))


def _chunks(fixed: Mapping[str, Any], pp: int) -> Sequence[int]:
    if "chunks" in fixed:
        return (fixed["chunks"],)
    return (fixed["all_chunks"] // pp,) if "all_chunks" in fixed else _CHUNKS


def _schedules(fixed: Mapping[str, Any], pp: int) -> Iterator[tuple[str, int]]:
    """The fixed schedule, or 1F1B and interleaved, with their possible numbers of chunks."""
    for chunks in _chunks(fixed, pp):
        name = fixed.get("schedule", "interleaved" if chunks > 1 else "1f1b")
        fewest, most = SCHEDULE_CHUNKS.get(name, (chunks, chunks))
        if fewest <= chunks <= (most or chunks):
            yield name, chunks


def _other_schedules(job: Job, layout: Layout, fixed: Mapping[str, Any]) -> Iterator[Layout]:
    """The layout with every other pipeline schedule and its possible numbers of chunks."""
    if layout.pp == 1 or "schedule" in fixed:
        return
    for name, (fewest, most) in SCHEDULE_CHUNKS.items():
        for chunks in _chunks(fixed, layout.pp):
            is_known = name in ("1f1b", "interleaved")
            fits = fewest <= chunks <= (most or chunks) and _divides(job, layout.pp, chunks)
            if is_known or not fits:
                continue
            yield dataclasses.replace(layout, schedule=name, chunks=chunks)


def neighbours(job: Job, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Layouts that differ in one setting, with the name of the change."""
    for name in ("tp", "pp", "cp"):
        for size in (getattr(layout, name) * 2, getattr(layout, name) // 2):
            changed = _resized(job, layout, name, size)
            if changed is not None:
                yield f"{name} {size}", changed
    for micro in (layout.micro_batch * 2, layout.micro_batch // 2):
        if micro and job.global_batch % (layout.dp * micro) == 0:
            batches = job.global_batch // (layout.dp * micro)
            yield f"micro-batch {micro}", dataclasses.replace(layout, micro_batch=micro, micro_batches=batches)
    for recompute in (NOTHING, ATTENTION, BLOCKS):
        if recompute != layout.recompute and (recompute != ATTENTION or layout.cp == 1):
            yield f"recompute {recompute}", dataclasses.replace(layout, recompute=recompute)
    for zero in (1, 2, 3):
        if zero != layout.zero and (zero in ENGINES[DEFAULT_ENGINE].zero_stages or layout.pp == 1):
            yield f"ZeRO {zero}", dataclasses.replace(layout, zero=zero)
    if layout.pp > 1:
        for name, (fewest, _) in SCHEDULE_CHUNKS.items():
            chunks = max(fewest, layout.chunks if SCHEDULE_CHUNKS[name][1] is None else fewest)
            if name != layout.schedule and _divides(job, layout.pp, chunks):
                yield name, dataclasses.replace(layout, schedule=name, chunks=chunks)


def _resized(job: Job, layout: Layout, name: str, size: int) -> Layout | None:
    """The layout with another size of an axis and an adjusted `dp`; None if the sizes do not divide."""
    if size < 1:
        return None
    resized: dict[str, Any] = {name: size, "dp": 1}
    changed = dataclasses.replace(layout, **resized)
    dp, rest = divmod(job.cluster.devices, changed.devices)
    if (
        rest
        or dp < 1
        or job.global_batch % (dp * layout.micro_batch)
        or (changed.pp > 1 and not _divides(job, changed.pp, changed.chunks))
        or (changed.cp > 1 and job.sequence_length % (changed.cp * 2))
        or dp * changed.expert_copies % changed.ep
    ):
        return None
    schedule: dict[str, Any] = {"schedule": "1f1b", "chunks": 1} if changed.pp == 1 or layout.pp == 1 else {}
    return dataclasses.replace(
        changed,
        dp=dp,
        micro_batches=job.global_batch // (dp * layout.micro_batch),
        splits_sequence=changed.tp > 1,
        zero=min(layout.zero, 2) if changed.pp > 1 else layout.zero,
        **schedule,
    )
