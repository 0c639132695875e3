"""Formats a plan as text."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron.observe.quantities import duration, short_count
from trident.plan.job import Job
from trident.plan.layouts import Layout
from trident.plan.search import LayoutEstimate, LayoutPlan, estimate, neighbours

_GIB, _GB = 2**30, 1e9
_HOUR = 3600.0
_EVEN = 0.0005  # relative difference in tokens per second that is shown as 0.0 %


def plan_lines(
    plan: LayoutPlan,
    problems: Callable[[Layout], Sequence[str]],
    command: Sequence[str],
    train_tokens: int | None,
    price: float | None,
) -> Iterator[str]:
    """Formats the table of layouts, and the details of the first.

    Args:
        problems: validates the flags of a layout.
        command: the printed command line; the flags of the layout are appended.
        train_tokens: the length of training, if known.
        price: of a device hour, if known.
    """
    yield title(plan.job)
    if not plan.best:
        yield from _nothing_fits(plan)
        return
    capacity = _gib(plan.job.cluster.device.memory_bytes)
    yield f"{plan.considered:,} layouts, {plan.fitting:,} fit into {capacity} GiB; the simplest within 2 % comes first"
    yield from table_lines(plan.best)
    yield ""
    yield from detail_lines(plan.best[0], train_tokens, price)
    yield ""
    yield from neighbour_lines(plan.best[0], problems)
    yield ""
    yield shlex.join([*command, *plan.best[0].layout.flags()])


def title(job: Job) -> str:
    """Formats the network, its batch and its devices."""
    cluster = job.cluster
    return (
        f"{short_count(job.parameters)} parameters, {job.global_batch:,} samples of {job.sequence_length:,} tokens a "
        f"step ({short_count(job.tokens)} tokens), {cluster.devices:,} x {cluster.device.name} on {cluster.nodes:,} "
        f"{'node' if cluster.nodes == 1 else 'nodes'}, {cluster.links.name}"
    )


def table_lines(estimates: Sequence[LayoutEstimate]) -> Iterator[str]:
    """Formats a line per layout."""
    yield f"{'tokens/s':>12} {'MFU':>6} {'step s':>8} {'GiB':>6} {'idle':>6}  layout"
    for each in estimates:
        yield (
            f"{each.tokens_per_second:>12,.0f} {each.utilization:>6.1%} {each.time.seconds:>8.2f} "
            f"{_gib(each.memory.total):>6} {each.time.idle:>6.1%}  {each.layout}"
        )


def detail_lines(chosen: LayoutEstimate, train_tokens: int | None, price: float | None) -> Iterator[str]:
    """Formats memory, time and messages of a layout."""
    yield f"{chosen.layout}:"
    yield from memory_lines(chosen)
    parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in _largest(chosen.time.parts))
    yield f"  seconds per step: {chosen.time.seconds:.3g}: {parts}"
    if chosen.time.sent:
        sent = ", ".join(f"{axis} {count / _GB:.3g}" for axis, count in chosen.time.sent.items())
        yield f"  GB sent per rank and step, by axis: {sent}"
    if train_tokens:
        seconds = train_tokens / chosen.tokens_per_second
        hours = seconds / _HOUR * chosen.job.cluster.devices
        cost = "" if price is None else f", {hours * price:,.0f} at {price:g} per device hour"
        yield f"  {train_tokens:,} tokens take {duration(seconds)}, {hours:,.0f} device hours{cost}"


def memory_lines(chosen: LayoutEstimate) -> Iterator[str]:
    """Formats the memory of a rank by kind."""
    kinds = ", ".join(f"{name} {_gib(count)}" for name, count in chosen.memory.by_kind().items() if count)
    capacity = chosen.job.cluster.device.memory_bytes
    yield f"  GiB on the fullest rank: {_gib(chosen.memory.total)} of {_gib(capacity)}: {kinds}"
    if chosen.memory.host:
        host = _gib(chosen.memory.host)
        yield f"  GiB of host memory per rank: {host}; the time of updates on the host is not included"


def neighbour_lines(chosen: LayoutEstimate, problems: Callable[[Layout], Sequence[str]]) -> Iterator[str]:
    """Compares layouts that differ in one setting."""
    yield "alternatives with one change:"
    for name, layout in neighbours(chosen.job, chosen.layout):
        refused = problems(layout)
        if refused:
            yield f"  {name}: refused: {refused[0]}"
            continue
        other = estimate(chosen.job, layout)
        if not other.fits:
            kind, count = _grown(chosen.memory.by_kind(), other.memory.by_kind())
            yield f"  {name}: does not fit: {_gib(other.memory.total)} GiB, {kind} +{_gib(count)}"
        else:
            yield f"  {name}: {_change(chosen, other)}"


def _change(chosen: LayoutEstimate, other: LayoutEstimate) -> str:
    """The difference in speed and its main cause; for equal speeds, what takes longer and what less."""
    change = other.tokens_per_second / chosen.tokens_per_second - 1
    more, is_even = f"{(other.memory.total - chosen.memory.total) / _GIB:+.1f} GiB", abs(change) < _EVEN
    memory = "same memory" if more[1:] == "0.0 GiB" else more
    reasons = [f"same speed, {memory}" if is_even else f"{change:+.1%} tokens/s"]
    for sign, before, after in (("+", chosen, other), ("-", other, chosen)):
        part, seconds = _grown(before.time.parts, after.time.parts)
        if seconds > 1e-9 and (is_even or (sign == "-") == (change > 0)):
            reasons.append(f"{part} {sign}{seconds:.3g} s")
    return f"{reasons[0]}: {', '.join(reasons[1:])}" if reasons[1:] else reasons[0]


def _nothing_fits(plan: LayoutPlan) -> Iterator[str]:
    capacity = plan.job.cluster.device.memory_bytes
    yield f"None of {plan.considered:,} layouts fits into {_gib(capacity)} GiB. Use more devices, or shorter samples."
    if plan.smallest is not None:
        yield f"Smallest layout: {plan.smallest.layout}"
        yield from memory_lines(plan.smallest)


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[str, float]:
    """The entry that grew the most, and its growth."""
    names = {*before, *after}
    name = max(sorted(names), key=lambda each: after.get(each, 0) - before.get(each, 0))
    return name, after.get(name, 0) - before.get(name, 0)


def _largest(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(((name, value) for name, value in parts.items() if value > 0), key=lambda item: -item[1])


def _gib(count: float) -> str:
    return f"{count / _GIB:.1f}"
