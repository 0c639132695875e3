"""The path of a batch: from a line of text in a file to the loss that is logged, and back to the weights."""

from __future__ import annotations

from docs.site.drawings.canvas import Canvas

_SHARES = ("samples 0 and 1, then 4 and 5", "samples 2 and 3, then 6 and 7")


def draw_batch() -> str:
    """The drawing of the three parts: token files, the order of samples, and a step."""
    canvas = Canvas(
        960,
        760,
        "From a line of text to the loss",
        "Text is encoded once into token files. At the start of a run the order of all samples is planned. In every "
        "step the samples of a global batch are divided among the copies of the model, pass through the stages, and "
        "give one sum of losses and one number of tokens.",
    )
    _draw_preparation(canvas)
    _draw_order(canvas)
    _draw_step(canvas)
    return canvas.to_svg()


def _band(canvas: Canvas, y: float, height: float, title: str) -> None:
    canvas.box(20, y, 920, height, color="soft", radius=14)
    canvas.text(40, y + 28, title, color="soft", bold=True, size=16)


def _draw_preparation(canvas: Canvas) -> None:
    _band(canvas, 20, 150, "once: tools/preprocess_data.py")
    canvas.labelled_box(40, 70, 230, 80, 'corpus.jsonl\n{"text": "Once upon ..."}\none document a line', color="plain")
    canvas.arrow([(274, 110), (346, 110)])
    canvas.labelled_box(354, 70, 230, 80, "tokenizer\nOnce | upon | a | ...\n5811 · 2402 · 64 · ...", color="plain")
    canvas.arrow([(588, 110), (660, 110)])
    canvas.labelled_box(
        668, 70, 250, 80, "corpus_text_document\n.bin: all ids, .idx: where\neach document begins", color="teal"
    )


def _draw_order(canvas: Canvas) -> None:
    _band(canvas, 200, 180, "at the start: the order of all samples, a function of seed and data")
    canvas.arrow([(793, 154), (793, 244)], color="teal")
    canvas.labelled_box(668, 250, 250, 110, "documents\nshuffled, end to end, and\ncut every s tokens", color="teal")
    canvas.arrow([(664, 305), (592, 305)], color="teal")
    canvas.labelled_box(354, 250, 230, 110, "samples\nshuffled and blended\nby the sources' weights", color="amber")
    canvas.arrow([(350, 305), (278, 305)], color="amber")
    canvas.labelled_box(
        40, 250, 230, 110, "sample n of the run\nn counts consumed samples:\nall that a resume must know", color="amber"
    )


def _draw_step(canvas: Canvas) -> None:
    _band(canvas, 410, 330, "every step")
    canvas.arrow([(155, 364), (155, 454)], color="amber")
    canvas.labelled_box(40, 460, 230, 110, "global batch\nsamples n to n + 7:\ntokens and labels [b, s]", color="amber")
    for copy in range(2):
        y = 452 + copy * 66
        canvas.arrow([(274, 515), (350, y + 28)], color="amber")
        canvas.labelled_box(354, y, 230, 56, f"copy {copy} of the model\n{_SHARES[copy]}", color="violet")
        canvas.arrow([(588, y + 28), (664, y + 28)], color="violet")
        canvas.labelled_box(668, y, 250, 56, "stage 0, then stage 1\n[b, s] to [b, s, h] to [b, s, v]", color="violet")
    canvas.arrow([(793, 578), (793, 628)], color="violet")
    canvas.labelled_box(668, 634, 250, 86, "on each copy\nsum of losses\nnumber of counted tokens", color="violet")
    canvas.arrow([(664, 677), (592, 677)], color="violet")
    canvas.labelled_box(
        354, 634, 230, 86, "over all copies\nloss = Σ losses / Σ tokens\nand gradients likewise", color="rose"
    )
    canvas.arrow([(350, 677), (278, 677)], color="rose")
    canvas.labelled_box(40, 634, 230, 86, "update\nn grows by 8; the learning\nrate is a function of n", color="rose")
