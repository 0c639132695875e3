"""A ring of four ranks that shares samples: the blocks of tokens of each rank, and the attention it computes."""

from __future__ import annotations

from collections.abc import Sequence

from docs.site.drawings.canvas import Canvas

RANKS = 4
CAUSAL = (0, 1, 2, 3, 3, 2, 1, 0)  # the rank of each block of a sample
DOCUMENTS = (10, 4, 2)  # blocks of each document of another sample
BY_DOCUMENT = (0, 1, 2, 2, 3, 1, 1, 3, 2, 0, 2, 0, 3, 0, 3, 1)
_COLORS = ("teal", "amber", "violet", "rose")
_SIDE = 320


def draw_sequence() -> str:
    """The drawing of two samples, each with a row for every block of queries."""
    canvas = Canvas(
        960,
        560,
        "A ring of four ranks shares two samples",
        "Each row is a block of queries in the color of its rank; the cells of the row are the blocks of keys that "
        "the queries see. Every rank has as many tokens and computes as much as the others.",
    )
    _draw_sample(canvas, 40, "a causal sample: 8 blocks", CAUSAL, (len(CAUSAL),))
    _draw_sample(canvas, 520, "three documents, separated: 16 blocks", BY_DOCUMENT, DOCUMENTS)
    for rank, color in enumerate(_COLORS):
        left = 112 + rank * 200
        canvas.box(left, 500, 22, 22, color=color, radius=3)
        canvas.text(left + 32, 516, f"queries of rank {rank}")
    return canvas.to_svg()


def _draw_sample(canvas: Canvas, left: int, title: str, owners: Sequence[int], documents: Sequence[int]) -> None:
    canvas.text(left + 60, 40, title, color="plain", bold=True, size=16)
    canvas.text(left + 60, 64, "keys, from the first to the last")
    side, corner, top = _SIDE / len(owners), left + 60, 80
    starts = [sum(documents[:number]) for number, blocks in enumerate(documents) for _ in range(blocks)]
    for query, rank in enumerate(owners):
        y = top + query * side
        canvas.text(left + 40, y + side / 2 + 5, str(rank), anchor="middle", size=13, bold=True)
        for key in range(len(owners)):
            is_seen = starts[query] <= key <= query
            canvas.box(corner + key * side, y, side, side, color=_COLORS[rank] if is_seen else "soft", radius=0)
    canvas.text(left + 60, top + _SIDE + 26, "rank of each block of queries on the left", size=13)
