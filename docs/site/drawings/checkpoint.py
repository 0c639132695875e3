"""A checkpoint's pieces: what ranks of one layout write, and what ranks of another read of it."""

from __future__ import annotations

from docs.site.drawings.canvas import Canvas

ROWS = 12  # of the tensor in the drawing
_COLORS = ("teal", "amber", "violet", "rose")
_TOP, _TALL = 130, 240


def rows_of(rank: int, ranks: int) -> tuple[int, int]:
    """The rows [first, last) of the tensor that a tensor-parallel rank holds."""
    return ROWS * rank // ranks, ROWS * (rank + 1) // ranks


def draw_checkpoint() -> str:
    """The drawing of one tensor on its way from three ranks through the folder to two ranks."""
    canvas = Canvas(
        960,
        520,
        "One tensor, written by 3 ranks and read by 2",
        "Each of three ranks writes its rows of a tensor to its own file. The manifest lists the pieces by rows of the "
        "whole tensor, so each of two ranks can read the rows it needs, from one file or from two.",
    )
    canvas.text(30, 40, "written with tensor size 3", bold=True, size=17)
    canvas.text(480, 40, "the folder iter_0000100", bold=True, size=17, anchor="middle")
    canvas.text(930, 40, "read with tensor size 2", bold=True, size=17, anchor="end")
    canvas.box(250, 60, 460, 430, color="soft", radius=14)
    for rank in range(3):
        _draw_written(canvas, rank)
    for rank in range(2):
        _draw_read(canvas, rank)
    canvas.labelled_box(
        275,
        390,
        410,
        80,
        "manifest.json\nwhich rows of which tensor are where,\nand a digest of every 16 MiB",
        color="plain",
    )
    canvas.text(480, 88, "decoder.layers.0.mlp.linear_fc1.weight", anchor="middle", mono=True, size=14)
    canvas.text(480, 110, f"rows 0 to {ROWS - 1} of the whole tensor", anchor="middle")
    return canvas.to_svg()


def _height(rows: int) -> float:
    return _TALL * rows / ROWS


def _draw_written(canvas: Canvas, rank: int) -> None:
    first, last = rows_of(rank, 3)
    y, height = _TOP + _height(first), _height(last - first) - 8
    canvas.labelled_box(30, y, 150, height, f"rank {rank}\nrows {first} to {last - 1}", color=_COLORS[rank])
    canvas.arrow([(184, y + height / 2), (282, y + height / 2)], color=_COLORS[rank])
    canvas.box(290, y, 380, height, color=_COLORS[rank])
    canvas.text(
        480,
        y + height / 2 + 5,
        f"pieces_0000{rank}.safetensors",
        color=_COLORS[rank],
        anchor="middle",
        mono=True,
        size=14,
    )


def _draw_read(canvas: Canvas, rank: int) -> None:
    first, last = rows_of(rank, 2)
    y, height = _TOP + _height(first), _height(last - first) - 8
    canvas.labelled_box(780, y, 150, height, f"rank {rank}\nrows {first} to {last - 1}", color="plain")
    for written in range(3):
        begin, end = (max(first, rows_of(written, 3)[0]), min(last, rows_of(written, 3)[1]))
        if begin < end:
            middle = _TOP + _height(begin) + _height(end - begin) / 2 - 4
            canvas.arrow([(674, middle), (774, middle)], color=_COLORS[written])
            canvas.text(724, middle - 8, f"{begin} to {end - 1}", anchor="middle", size=13)
