"""Writes the mean of several checkpoints' weights as a checkpoint.

    python tools/average_checkpoints.py checkpoints/gpt2 --last 3 --save checkpoints/mean
    python tools/average_checkpoints.py runs/a runs/b/iter_0000500 --coefficients 3 1 --save checkpoints/mean

The checkpoints may have different layouts, but must hold the same network. The result holds weights only: text is
generated from it as it is, and training continues from it with --finetune. Memory does not grow with the size of the
checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log
from megatron.config import ConfigSection, flag, parse_flags
from megatron.errors import CheckpointError


@dataclass(frozen=True)
class AverageFlags(ConfigSection):
    """Flags of this program."""

    load: tuple[str, ...] = flag(
        help="checkpoints, or folders of checkpoints whose newest is taken; the flag's name may be left out", nargs="+"
    )
    save: str = flag(help="folder to write the checkpoint to; it must hold none")
    last: int | None = flag(None, "average so many of the newest checkpoints of one folder", at_least=2)
    coefficients: tuple[float, ...] = flag(
        (), "how much each checkpoint counts, in the same order; only their ratios matter; all the same if unset",
        nargs="+", above=0,
    )  # fmt: skip

    def problems(self) -> Iterator[str]:
        """Rules between the flags."""
        if self.last is not None and len(self.load) != 1:
            yield f"--last {self.last} takes the checkpoints of one folder, and {len(self.load)} are given."
        if self.last is None and len(self.load) < 2:
            yield f"a mean needs two checkpoints, and only {self.load[0]} is given. Give more, or --last N."
        count = self.last or len(self.load)
        if self.coefficients and len(self.coefficients) != count:
            yield f"--coefficients has {len(self.coefficients)} numbers for {count} checkpoints. Give one for each."


def main(argv: Sequence[str] | None = None) -> int:
    """Averages the checkpoints."""
    flags = parse_flags(
        AverageFlags,
        sys.argv[1:] if argv is None else argv,
        prog="average_checkpoints.py",
        description=__doc__ or "",
        unnamed="--load",
    )

    from megatron.checkpoint.analysis.average import Share, average
    from megatron.checkpoint.analysis.slices import OpenCheckpoint

    opened = [OpenCheckpoint.newest(path) for path in _folders(flags)]
    coefficients = flags.coefficients or (1.0,) * len(opened)
    shares = [Share(checkpoint, share) for checkpoint, share in zip(opened, coefficients, strict=True)]
    made = average(shares, Path(flags.save))
    log.line(f"the mean of {len(shares)} checkpoints is in {made}")
    return 0


def _folders(flags: AverageFlags) -> list[Path]:
    """The folders to average, those of `--last` from the oldest to the newest.

    Raises:
        CheckpointError: the folder holds fewer checkpoints than asked for.
    """
    from megatron.checkpoint import find

    if flags.last is None:
        return [Path(path) for path in flags.load]
    found = find(Path(flags.load[0]))
    if len(found) < flags.last:
        raise CheckpointError(
            f"--last {flags.last}: {flags.load[0]} holds {len(found)} checkpoints. Ask for fewer, or name them."
        )
    return [candidate.path for candidate in reversed(found[: flags.last])]


if __name__ == "__main__":
    log.exit_with(main)
