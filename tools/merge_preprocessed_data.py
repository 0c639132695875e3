r"""Merges preprocessed corpora; the result is byte-identical to preprocessing everything at once.

    python tools/merge_preprocessed_data.py --datasets part1_text_document part2_text_document \
        --output-prefix whole_text_document
    torchrun --nproc-per-node 4 tools/merge_preprocessed_data.py --merge distributed --datasets ... --output-prefix ...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log, process_exit
from megatron.config import ConfigSection, ParallelRequest, PathUse, flag, parse_flags
from megatron.config.flags.paths import prefix_problems

_LONGEST_WAIT_MINUTES = 7 * 24 * 60


@dataclass(frozen=True)
class MergeFlags(ConfigSection):
    """Upstream's flags of this tool."""

    datasets: tuple[str, ...] = flag(
        help="data prefixes to merge, without .bin/.idx, in the order of the result", nargs="+", path=PathUse.PREFIX
    )
    output_prefix: str = flag(help="data prefix of the output, without .bin/.idx", path=PathUse.NEW_PREFIX)
    merge: str = flag(
        "serial",
        "serial copies in this process; distributed divides the copying among ranks started by torchrun or the like, "
        "which must share a file system",
        choices=("serial", "distributed"),
    )
    torch_backend: str | None = flag(
        None,
        "backend of --merge distributed; mpi is accepted, but gloo is used, as PyTorch from PyPI has no MPI backend",
        choices=("gloo", "mpi"),
    )
    local_rank: int | None = flag(None, "local rank of this process, set by launchers", spelled=("--local_rank",))

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        yield from prefix_problems("--output-prefix", self.output_prefix, ".bin")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool on the command line's flags."""
    arguments = sys.argv[1:] if argv is None else argv
    flags = parse_flags(MergeFlags, arguments, prog="merge_preprocessed_data.py", description=__doc__ or "")
    process_exit.interrupt_on_sigterm()
    if flags.merge == "distributed":
        return _merge_distributed(flags)
    from trident.corpus.preprocess.merge import merge

    plan = merge(flags.datasets, flags.output_prefix)
    log.info(_summary(flags, *plan.starts[-1], plan.index.bin_bytes))
    return 0


def _merge_distributed(flags: MergeFlags) -> int:
    from megatron.parallel.joining import close_mesh, open_mesh
    from megatron.parallel.messages import all_gather_json
    from trident.corpus.preprocess.merge import merge
    from trident.corpus.workers.ranks import JobRanks

    mesh = open_mesh(
        ParallelRequest(
            distributed_backend="gloo",
            distributed_timeout_minutes=_LONGEST_WAIT_MINUTES,
            local_rank=flags.local_rank,
        )
    )
    ranks = JobRanks(mesh.world.rank, mesh.world.size, lambda value: all_gather_json(value, mesh.world))
    plan = merge(flags.datasets, flags.output_prefix, ranks)
    log.info(_summary(flags, *plan.starts[-1], plan.index.bin_bytes))
    close_mesh(mesh)
    return 0


def _summary(flags: MergeFlags, sequences: int, documents: int, tokens: int, size_bytes: int) -> str:
    return (
        f"Merged {len(flags.datasets)} datasets into {flags.output_prefix} (.bin, .idx): {documents} documents, "
        f"{sequences} sequences, {tokens} tokens, {size_bytes / 1e6:.1f} MB."
    )


if __name__ == "__main__":
    process_exit.exit_with(main)
