"""The grid of 8 ranks: 2 copies of the model, each of 2 pipeline stages, each stage split over 2 ranks."""

from __future__ import annotations

from docs.site.drawings.canvas import Canvas

TENSOR = PIPELINE = DATA = 2
SAMPLES = ("0, 1, 4, 5", "2, 3, 6, 7")  # of a global batch, with micro-batches of two


def rank_of(stage: int, copy: int, part: int) -> int:
    """The global rank at a place of the grid: neighbours of a tensor-parallel group come first, then copies."""
    return (stage * DATA + copy) * TENSOR + part


def draw_ranks() -> str:
    """The drawing of the grid and of what crosses it."""
    canvas = Canvas(
        960,
        620,
        "Eight ranks as tensor 2 × pipeline 2 × data 2",
        "Two copies of the model side by side. Each has two pipeline stages, one above the other, and each stage is "
        "split over two ranks that exchange partial results.",
    )
    layers = ("embedding, blocks 0 to 11", "blocks 12 to 23, output and loss")
    for copy in range(DATA):
        left = 20 + copy * 500
        canvas.box(left, 20, 420, 470, color="soft", radius=14)
        canvas.text(left + 210, 50, f"copy {copy} of the model", color="soft", anchor="middle", bold=True, size=17)
        canvas.text(left + 210, 72, f"samples {SAMPLES[copy]} of every 8", anchor="middle")
        for stage in range(PIPELINE):
            top = 92 + stage * 215
            canvas.box(left + 15, top, 390, 170, color="plain", radius=10)
            canvas.text(left + 210, top + 154, f"stage {stage}: {layers[stage]}", color="plain", anchor="middle")
            for part in range(TENSOR):
                _draw_rank(canvas, left + 31 + part * 214, top + 16, rank_of(stage, copy, part), part)
            middle = top + 71
            canvas.arrow([(left + 177, middle), (left + 243, middle)], color="teal", both_ends=True)
        for part in range(TENSOR):
            x = left + 46 + part * 338
            canvas.arrow([(x, 222), (x, 319)], color="amber", both_ends=True)
    for stage in range(PIPELINE):
        y = 163 + stage * 215
        pairs = [f"{rank_of(stage, 0, part)} and {rank_of(stage, 1, part)}" for part in range(TENSOR)]
        canvas.arrow([(430, y), (530, y)], color="violet", both_ends=True)
        canvas.text(480, y - 12, pairs[0], anchor="middle", size=13)
        canvas.text(480, y + 24, pairs[1], anchor="middle", size=13)
    _draw_legend(canvas)
    return canvas.to_svg()


def _draw_rank(canvas: Canvas, x: float, y: float, rank: int, part: int) -> None:
    canvas.labelled_box(x, y, 144, 110, f"rank {rank}\nhalf {part} of each\nmatrix and head", color="teal")


def _draw_legend(canvas: Canvas) -> None:
    entries = (
        ("teal", "tensor: partial results are summed, twice in a block, forward and backward"),
        ("amber", "pipeline: hidden states [b, s, h] go down, their gradients come back"),
        ("violet", "data: gradients of the same parameters are summed once a step"),
    )
    for number, (color, words) in enumerate(entries):
        y = 525 + number * 34
        canvas.arrow([(60, y), (130, y)], color=color, both_ends=True)
        canvas.text(150, y + 5, words)
