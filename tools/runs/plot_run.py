r"""Plots the curves of runs in the terminal, and as an image with --output.

python tools/runs/plot_run.py runs/gpt-20260101-120000 --output loss.png
python tools/runs/plot_run.py runs/small runs/large --metric loss lr norm speed --x tokens --smooth 0.9 \
    --output runs.svg
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, flag, parse_flags

_METRICS = {
    "loss": "lm_loss",
    "lr": "learning_rate",
    "norm": "gradient_norm",
    "speed": "tokens_per_second",
    "mfu": "model_flops_utilization_ratio",
    "memory": "memory_bytes",
}

_MARK = re.compile(r"\d+(\.\d+)?(e\d+)?:.+")  # 500:killed


@dataclass(frozen=True)
class PlotFlags(ConfigSection):
    """Flags of this program."""

    runs: tuple[str, ...] = flag(
        help="run folders or metrics.jsonl files; also accepted as positional arguments",
        nargs="+",
        path=PathUse.FILE_OR_FOLDER,
    )
    output: str | None = flag(
        None, "image file; the extension (.png, .svg, .pdf) determines the format", path=PathUse.NEW_FILE
    )
    metric: tuple[str, ...] = flag(
        ("lm_loss",),
        f"metrics to plot, one panel each: {', '.join(_METRICS)}, or any number in a step record, such as loss_scale",
        nargs="+",
        synonyms=_METRICS,
    )
    x: str = flag(
        "steps",
        "unit of the x axis; hours are the time of training steps",
        choices=("steps", "samples", "tokens", "hours", "flops"),
    )
    smooth: float = flag(
        0.0,
        "smoothing: weight of the moving average at each new value; the original curve is drawn behind it",
        at_least=0,
        below=1,
    )
    title: str = flag("", "title of the image")
    names: tuple[str, ...] = flag((), "names of the runs in the legend; the folder names if unset")
    mark: tuple[str, ...] = flag(
        (), 'marks on the x axis of the image, with their labels: --mark 500:"new data" 800:killed', nargs="+"
    )
    log_scale: bool = flag(False, "logarithmic y axis of the image")
    terminal: bool = flag(True, "plot in the terminal")
    width: int = flag(72, "width of the terminal plot in characters", at_least=10)
    height: int = flag(14, "height of the terminal plot in lines", at_least=2)

    def problems(self) -> Iterator[str]:
        if self.names and len(self.names) != len(self.runs):
            yield f"--names has {len(self.names)} names for {len(self.runs)} runs. Give one for each run."
        for mark in self.mark:
            if not _MARK.fullmatch(mark):
                yield f"--mark {mark} is invalid. Expected POSITION:LABEL, such as 500:killed."
        if not self.terminal and self.output is None:
            yield "--no-terminal requires --output, for example --output loss.png."

    def marks(self) -> list[tuple[float, str]]:
        """The marked positions with their labels."""
        return [(float(position), label) for position, _, label in (mark.partition(":") for mark in self.mark)]


def main(argv: Sequence[str] | None = None) -> int:
    """Plots the curves and returns the exit code."""
    flags = parse_flags(
        PlotFlags,
        sys.argv[1:] if argv is None else argv,
        description=__doc__ or "",
        positional="--runs",
    )

    from trident.dashboard.curves.image import check_plot_path, draw_plot, write_plot
    from trident.dashboard.curves.reading import read_curves
    from trident.dashboard.curves.text import text_plot

    if flags.output is not None:
        check_plot_path(flags.output)
    names = flags.names or (None,) * len(flags.runs)
    panels = {
        metric: [
            curve
            for run, name in zip(flags.runs, names, strict=True)
            for curve in read_curves(run, metric, flags.x, name)
        ]
        for metric in flags.metric
    }
    is_unicode = log.takes_unicode("stdout")
    for metric, curves in panels.items() if flags.terminal else ():
        if len(panels) > 1:
            log.line(metric.replace("_", " "))
        trained = [curve.smoothed(flags.smooth) for curve in curves if not curve.is_evaluation]
        for text in text_plot(trained, width=flags.width, height=flags.height, unicode=is_unicode, axis=flags.x):
            log.line(text)
        for curve in curves:
            if curve.is_evaluation:
                log.line(curve.summary(flags.x))
    if flags.output is not None:
        figure = draw_plot(
            panels,
            flags.output,
            axis=flags.x,
            smoothing_ratio=flags.smooth,
            title=flags.title,
            log_scale=flags.log_scale,
            marks=flags.marks(),
        )
        write_plot(figure, flags.output)
        log.line(f"wrote {flags.output}")
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
