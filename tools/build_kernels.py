#!/usr/bin/env python
"""Builds the fused operations of csrc/ops for the installed torch, for CPU and, where nvcc is found, for CUDA.

    python tools/build_kernels.py

The library goes into the package, and runs use it from then on where it is measured to be faster (`--kernels`); `python
tools/doctor.py` shows what is in use. Nothing is ever compiled while a run starts.
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

    output: str | None = flag(None, "folder for the library; the package's if not given", path=PathUse.FOLDER)
    only: tuple[str, ...] = flag(
        (), "operations to build, by their folders in csrc/ops or their names in --kernels", nargs="+"
    )
    cuda: str = flag(
        "auto", "whether to build for GPUs: if nvcc and a torch with CUDA are there", choices=("auto", "yes", "no")
    )
    architectures: str = flag("80,90,100", "compute capabilities of GPUs, such as 90 for H100 and H200")
    native: bool = flag(False, "code for the CPU of this machine only, which compiles three times as fast")
    jobs: int | None = flag(None, "compilers that run at the same time; one per core if not given", at_least=1)
    time_limit: int = flag(1800, "seconds after which the build is aborted", at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Builds the library."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = parse_flags(BuildFlags, words, prog="build_kernels.py", description=__doc__ or "")

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
    log.line("runs use it where it was measured to be faster, or with --kernels csrc; python tools/doctor.py shows it")
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
