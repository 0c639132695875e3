"""Collects the wheels that a GPU machine without a network lacks, for `run.sh --wheels`.

    python -m benchmarks.gpu.wheels --output wheels

DeepSpeed is published as source only, so its wheel is made here, without its compiled operations. What a machine with
PyTorch has anyway (NumPy, packaging, psutil, tqdm, ...) is left out; `--packages` adds what it lacks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from megatron import log, process_exit
from megatron.config import ConfigSection, flag, parse_flags
from megatron.errors import ConfigError, LaunchError

# What DeepSpeed and this project need beyond PyTorch and transformers; pydantic-core and orjson are not pure Python.
PACKAGES = (
    *("hjson", "py-cpuinfo", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "einops"),
    *("msgpack", "orjson"),
)
GLIBC_MINORS = (17, 24, 28, 34)
MAXIMUM_BYTES = 40 * 2**20


@dataclass(frozen=True)
class WheelFlags(ConfigSection):
    """Flags of this program."""

    output: str = flag("gpu-wheels", "folder of the wheels")
    python: str = flag("3.12", "version of Python on the GPU machine")
    packages: tuple[str, ...] = flag(PACKAGES, "packages besides DeepSpeed, in the versions that are installed here")


def main(argv: Sequence[str] | None = None) -> int:
    """Collects the wheels and names them."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = parse_flags(WheelFlags, words, prog="python -m benchmarks.gpu.wheels", description=__doc__ or "")
    folder = Path(flags.output)
    folder.mkdir(parents=True, exist_ok=True)
    for command in commands(folder, flags.python, [pinned(name) for name in flags.packages], pinned("deepspeed")):
        if subprocess.run(command, env={**os.environ, "DS_BUILD_OPS": "0"}, check=False).returncode:
            raise LaunchError(f"The wheels could not be collected. The command that failed was: {' '.join(command)}")
    check_size(folder)
    return 0


def pinned(name: str) -> str:
    """A package in the version that is installed here.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return f"{name}=={metadata.version(name)}"
    except metadata.PackageNotFoundError:
        raise ConfigError(f"--packages: {name} is not installed here, so there is no version to collect.") from None


def commands(folder: Path, python: str, packages: Sequence[str], deepspeed: str) -> list[list[str]]:
    """pip's commands: wheels of the other machine's Python, and DeepSpeed's, which is made from source."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    platforms = [word for minor in GLIBC_MINORS for word in ("--platform", f"manylinux_2_{minor}_x86_64")]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    older = ["--platform", "manylinux2014_x86_64"]
    return [
        [*pip, "download", "--quiet", "--no-deps", *target, *older, "--dest", str(folder), *packages],
        [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), deepspeed],
    ]


def check_size(folder: Path) -> None:
    """Names the wheels of a folder with their sizes.

    Raises:
        ConfigError: they are larger than what is easily carried.
    """
    wheels = sorted(folder.glob("*.whl"))
    sizes = [path.stat().st_size for path in wheels]
    for path, size in zip(wheels, sizes, strict=True):
        log.line(f"{path.name} ({size / 2**20:.1f} MiB)")
    if sum(sizes) > MAXIMUM_BYTES:
        raise ConfigError(
            f"The wheels in {folder} have {sum(sizes) / 2**20:.0f} MiB and may have {MAXIMUM_BYTES // 2**20}. Remove "
            "what the machine has: --packages NAME..."
        )
    log.line(
        f"{len(wheels)} wheels, {sum(sizes) / 2**20:.1f} MiB. Copy them to the GPU machine, next to the repository:"
    )
    log.line(f"bash benchmarks/gpu/run.sh --wheels {folder} --output gpu-page")


if __name__ == "__main__":
    process_exit.exit_with(main)
