#!/usr/bin/env python
"""Builds the fused operations of csrc/ops for the installed torch, for CPU and, where nvcc is found, for CUDA.

    python tools/build_kernels.py

The library is installed into the package and used where it was measured to be faster (`--kernels`); `python
tools/doctor.py` lists the kernels in use. Runs never compile at startup.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, flag, parse_flags


@dataclass(frozen=True)
class BuildFlags(ConfigSection):
    """Flags of this program."""

    output: str | None = flag(None, "folder for the library; the package's if unset", path=PathUse.FOLDER)
    only: tuple[str, ...] = flag((), "operations to build, by folder in csrc/ops or name in --kernels", nargs="+")
    cuda: str = flag(
        "auto",
        "build CUDA kernels; auto: if nvcc and a CUDA build of torch are available",
        choices=("auto", "yes", "no"),
    )
    architectures: str = flag("80,90,100", "CUDA compute capabilities, such as 90 for H100 and H200")
    native: bool = flag(False, "compile for this machine's CPU only, in a third of the time")
    jobs: int | None = flag(None, "number of parallel compilers; one per core if unset", at_least=1)
    time_limit: int = flag(1800, "timeout of the build in seconds", at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Builds the library."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = parse_flags(BuildFlags, arguments, prog="build_kernels.py", description=__doc__ or "")

    from megatron.kernels.native.builder import BuildRequest, build

    process_exit.interrupt_on_sigterm()
    build(
        BuildRequest(
            folder=None if flags.output is None else Path(flags.output),
            only=flags.only,
            cuda=flags.cuda,
            architectures=tuple(flags.architectures.split(",")),
            native=flags.native,
            jobs=flags.jobs,
            seconds=flags.time_limit,
        ),
        log.line,
    )
    log.line("runs use it where it was measured to be faster, or with --kernels csrc; see python tools/doctor.py")
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
