"""The commands of docs/seeds/jax_lm_training.md, run once for all tests of that system."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.helpers.commands.guides import blocks, run_commands


@dataclass(frozen=True)
class PageRun:
    """The folder of the commands and their output."""

    folder: Path
    out: str
    err: str

    def log(self, save: str) -> list[str]:
        """The lines of a training run's log file."""
        return (self.folder / save / "run" / "log.txt").read_text().splitlines()


def run_page(folder: Path) -> PageRun:
    """Runs all commands of the page in a folder."""
    commands = "\n".join(blocks("seeds/jax_lm_training.md"))
    return PageRun(folder, *run_commands(folder, commands, examples=True))
