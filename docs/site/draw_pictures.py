"""Draws the pictures of the documents as SVG files; what is there already is replaced.

python docs/site/draw_pictures.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import process_exit
from megatron.config import ConfigSection, PathUse, flag, parse_flags


@dataclass(frozen=True)
class DrawFlags(ConfigSection):
    """Flags of this program."""

    output: str = flag("docs/pictures", "folder of the drawings", path=PathUse.FOLDER)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes all drawings and returns the exit code."""
    flags = parse_flags(DrawFlags, sys.argv[1:] if argv is None else argv, description=__doc__ or "")
    from docs.site.drawings.batch import draw_batch
    from docs.site.drawings.checkpoint import draw_checkpoint
    from docs.site.drawings.ranks import draw_ranks
    from docs.site.drawings.sequence import draw_sequence
    from megatron.parallel.schedule.building import build_schedule
    from tools.runs.schedule_drawing import svg

    folder = Path(flags.output)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "ranks": draw_ranks(),
        "checkpoint": draw_checkpoint(),
        "batch": draw_batch(),
        "sequence": draw_sequence(),
    }
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zbv", 2)):
        pictures[f"schedule-{name}"] = svg(build_schedule(name, 4, chunks, 8))
    for name, text in pictures.items():
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")
        print(folder / f"{name}.svg")
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
