"""Draws pipeline schedules, with a row for each rank, as SVG and as lines of text.

The colors are distinct for all kinds of color vision, and every box has its micro-batch and, where there is room, its
kind as text.

Source: the colors are from Okabe and Ito, "Color Universal Design" (2008).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from megatron.parallel.schedule.actions import Kind, Schedule
from megatron.parallel.schedule.simulation import TimedComputation, simulate

_COLORS = {
    Kind.FORWARD: "#56b4e9",
    Kind.BACKWARD: "#e69f00",
    Kind.INPUT_BACKWARD: "#f0e442",
    Kind.WEIGHT_BACKWARD: "#009e73",
}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_BACKWARD: "gradient of the input",
    Kind.WEIGHT_BACKWARD: "gradients of the weights",
}
_LEFT, _TOP, _UNIT, _ROW = 64, 40, 24, 30  # pixels
_TERMINAL_COLORS = {
    Kind.FORWARD: 117,
    Kind.BACKWARD: 214,
    Kind.INPUT_BACKWARD: 227,
    Kind.WEIGHT_BACKWARD: 79,
}  # of 256 colors


def timeline_of(schedule: Schedule) -> list[TimedComputation]:
    """The computations of a schedule with their times, in units of a forward pass."""
    return simulate(schedule.orders, schedule.placement)


def title_of(schedule: Schedule) -> str:
    """Name, sizes and idle share of a schedule."""
    chunks = f" x {schedule.chunks_per_rank} chunks" if schedule.chunks_per_rank > 1 else ""
    sizes = f"{schedule.ranks} rank{'s' * (schedule.ranks != 1)}{chunks}"
    batches = f"{schedule.micro_batches} micro-batch{'es' * (schedule.micro_batches != 1)}"
    return f"{schedule.name}: {sizes}, {batches}, {schedule.bubble_ratio:.1%} idle"


def svg(schedule: Schedule) -> str:
    """The schedule as an SVG document, with support for dark mode."""
    timeline = timeline_of(schedule)
    height = _TOP + schedule.ranks * _ROW + 44
    width = _LEFT + round(max(timed.end for timed in timeline) * _UNIT) + 16
    title = escape(title_of(schedule))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {max(width, 560)} {height}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="13" aria-label="{title}">',
            "<style>text { fill: #1f2933 } .box { stroke: #1f2933; stroke-width: 0.5 } .label { fill: #000000 } "
            "@media (prefers-color-scheme: dark) { text { fill: #e6ebf0 } .label { fill: #000000 } }</style>",
            f"<title>{title}</title>",
            f'<text x="{_LEFT}" y="22" font-weight="600">{title}</text>',
            *(
                f'<text x="{_LEFT - 8}" y="{_TOP + rank * _ROW + 19}" text-anchor="end">rank {rank}</text>'
                for rank in range(schedule.ranks)
            ),
            *(_box(schedule, timed) for timed in timeline),
            *_legend(schedule, timeline, height - 16),
            "</svg>\n",
        ]
    )


def _box(schedule: Schedule, timed: TimedComputation) -> str:
    """The box of a computation; later chunks of a rank are paler."""
    x, y, width = (
        _LEFT + timed.start * _UNIT,
        _TOP + timed.rank * _ROW,
        (timed.end - timed.start) * _UNIT,
    )
    chunk_index = schedule.placement.chunks_of(timed.rank).index(timed.chunk)
    box = f'x="{x:g}" y="{y}" width="{width:g}" height="{_ROW - 4}"'
    return (
        f"<g><title>{_NAMES[timed.kind]} of chunk {timed.chunk}, micro-batch {timed.micro_batch}</title>"
        f'<rect fill="#ffffff" {box}/><rect class="box" fill="{_COLORS[timed.kind]}" '
        f'fill-opacity="{_opacity(chunk_index, schedule.chunks_per_rank):g}" {box}/>'
        f'<text class="label" x="{x + width / 2:g}" y="{y + 17}" text-anchor="middle">{timed.micro_batch}</text></g>'
    )


def _opacity(index: int, chunks: int) -> float:
    return round(1 - 0.65 * index / max(1, chunks - 1), 3)


def _legend(schedule: Schedule, timeline: Sequence[TimedComputation], y: int) -> Iterator[str]:
    used = {timed.kind for timed in timeline}
    x = _LEFT
    for kind in (kind for kind in Kind if kind in used):
        yield f'<rect class="key" fill="{_COLORS[kind]}" x="{x}" y="{y - 11}" width="14" height="14"/>'
        yield f'<text x="{x + 20}" y="{y}">{_NAMES[kind]}</text>'
        x += 50 + 7 * len(_NAMES[kind])
    if schedule.chunks_per_rank > 1:
        yield f'<text x="{x}" y="{y}">paler: later chunk</text>'


def text_lines(schedule: Schedule, width: int, *, in_color: bool = False) -> list[str]:
    """The schedule as lines of text, with several columns per unit of time, or one if the terminal is narrow.

    Args:
        width: columns of the terminal; a longer schedule is truncated.
        in_color: True for colored boxes (escape codes).
    """
    timeline = timeline_of(schedule)
    label = len(f"rank {schedule.ranks - 1} ")
    length = round(max(timed.end for timed in timeline))
    digits = len(str(schedule.micro_batches - 1))
    unit = 2 + digits if label + (2 + digits) * length <= width else 1
    shown = min(length, (width - label) // unit)
    lines = [title_of(schedule)]
    for rank in range(schedule.ranks):
        cells = ["." + " " * (unit - 1)] * length
        for timed in (timed for timed in timeline if timed.rank == rank):
            chunk_index = schedule.placement.chunks_of(rank).index(timed.chunk)
            letter = timed.kind.value if chunk_index % 2 == 0 else timed.kind.value.lower()
            text = f"{letter}{timed.micro_batch}" if unit > 1 else letter
            count = round(timed.end - timed.start)
            filled = text.ljust(unit * count - (unit > 1), "-" if unit > 1 else letter) + " " * (unit > 1)
            for index in range(count):
                part = filled[unit * index : unit * (index + 1)]
                cells[round(timed.start) + index] = _colored(part, timed.kind) if in_color else part
        lines.append(f"rank {rank}".ljust(label) + "".join(cells[:shown]).rstrip())
    names = ", ".join(f"{kind.value} {_NAMES[kind]}" for kind in Kind if kind in {timed.kind for timed in timeline})
    lower = "; lower case: every second chunk of a rank" if schedule.chunks_per_rank > 1 else ""
    lines.append(f"{names}, . idle{lower}")
    if shown < length:
        lines.append(f"The terminal shows {shown} of {length} units of time; --draw FILE.svg draws all of them.")
    return lines


def _colored(text: str, kind: Kind) -> str:
    return f"\x1b[30;48;5;{_TERMINAL_COLORS[kind]}m{text}\x1b[0m"
