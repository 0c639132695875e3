"""Plots the curves of one or more runs: in the terminal, and as an image with --output.

python tools/plot_run.py runs/gpt-20260101-120000 --output loss.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log
from megatron.config import ConfigSection, flag, parse_flags


@dataclass(frozen=True)
class PlotFlags(ConfigSection):
    """Flags of this program."""

    runs: tuple[str, ...] = flag(
        help="run directories or their metrics.jsonl; the flag's name may be left out", nargs="+"
    )
    output: str | None = flag(None, "image to write; the extension (.png, .svg, .pdf) determines the format")
    metric: str = flag(
        "lm_loss", "what to plot: any number in a step record, such as gradient_norm or tokens_per_second"
    )
    width: int = flag(72, "width of the terminal plot in characters", at_least=10)
    height: int = flag(14, "height of the terminal plot in lines", at_least=2)


def main(argv: Sequence[str] | None = None) -> int:
    """Plots the curves and returns the exit code."""
    flags = parse_flags(
        PlotFlags,
        sys.argv[1:] if argv is None else argv,
        description="Plots the curves of one or more runs.",
        unnamed="--runs",
    )

    from megatron.observe.curves import check_plot_path, read_curves, text_plot, write_plot

    if flags.output is not None:
        check_plot_path(flags.output)
    curves = [curve for run in flags.runs for curve in read_curves(run, flags.metric)]
    encoding = (sys.stdout.encoding or "").lower()
    trained = [curve for curve in curves if not curve.is_evaluation]
    for text in text_plot(trained, width=flags.width, height=flags.height, unicode=encoding.startswith("utf")):
        log.line(text)
    for curve in curves:
        if curve.is_evaluation:
            log.line(curve.summary)
    if flags.output is not None:
        write_plot(curves, flags.output, flags.metric)
        log.line(f"wrote {flags.output}")
    return 0


if __name__ == "__main__":
    log.exit_with(main)
