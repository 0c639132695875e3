"""Shows what is in a checkpoint of any layout, and how two of them differ.

    python tools/inspect_checkpoint.py checkpoints/gpt2
    python tools/inspect_checkpoint.py checkpoints/gpt2/iter_0000500 --tensors 'decoder.layers.0.*' --moments --json
    python tools/inspect_checkpoint.py checkpoints/gpt2 --compare checkpoints/again

Of a folder of checkpoints the newest is taken. The exit code of a comparison is 0 if all tensors are equal and 77 if
not. Memory does not grow with the size of the checkpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log
from megatron.config import ConfigSection, flag, parse_flags
from megatron.errors import ExitCode


@dataclass(frozen=True)
class InspectFlags(ConfigSection):
    """Flags of this program."""

    load: str = flag(
        help="folder of checkpoints (the newest is taken), or one checkpoint; the flag's name may be left out"
    )
    compare: str | None = flag(None, "a second checkpoint to compare with")
    tensors: tuple[str, ...] = flag(
        (), "patterns of tensor names, such as 'decoder.layers.0.*'; all if unset", nargs="+"
    )
    moments: bool = flag(False, "also read the moments of the optimizer")
    manifest_only: bool = flag(False, "read no tensors: names, shapes and sizes at once, no figures of values")
    verify: bool = flag(False, "first read every byte and compare all digests")
    json: bool = flag(False, "print one JSON object")

    def problems(self) -> Iterator[str]:
        """Rules between the flags."""
        for name in ("compare", "moments"):
            if self.manifest_only and getattr(self, name):
                yield f"--manifest-only reads no values, and --{name} needs them. Drop one of them."


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a summary or a comparison and returns the exit code."""
    flags = parse_flags(
        InspectFlags,
        sys.argv[1:] if argv is None else argv,
        prog="inspect_checkpoint.py",
        description=__doc__ or "",
        unnamed="--load",
    )

    from megatron.checkpoint import verify
    from megatron.checkpoint.analysis.comparison import compare
    from megatron.checkpoint.analysis.slices import OpenCheckpoint
    from megatron.checkpoint.analysis.summary import summarize
    from megatron.checkpoint.analysis.tables import comparison_lines, summary_lines

    paths = [Path(path) for path in (flags.load, flags.compare) if path is not None]
    opened = [OpenCheckpoint.newest(path) for path in paths]
    if flags.verify:
        for checkpoint in opened:
            verify(checkpoint.folder)
    if len(opened) > 1:
        comparison = compare(opened[0], opened[1], flags.tensors, with_moments=flags.moments)
        _show(flags, comparison.to_json(), comparison_lines(comparison))
        return ExitCode.DONE if comparison.holds_same_tensors else ExitCode.NUMERICS
    summary = summarize(opened[0], flags.tensors, with_values=not flags.manifest_only, with_moments=flags.moments)
    _show(flags, summary.to_json(), summary_lines(summary))
    return ExitCode.DONE


def _show(flags: InspectFlags, value: object, lines: Iterator[str]) -> None:
    for line in [json.dumps(value, ensure_ascii=False)] if flags.json else lines:
        log.line(line)


if __name__ == "__main__":
    log.exit_with(main)
