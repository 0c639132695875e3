"""nvcc's resource report for every CUDA kernel in csrc/ops: registers, spills, shared memory. Needs nvcc, but no GPU.

    python benchmarks/kernel_resources.py --architectures 80,90

Compiles with the flags of tools/build_kernels.py, for one architecture after another, and prints a table in Markdown
with a line per kernel: its most registers over all of its instances, and its spills, if any, in bytes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import process_exit
from megatron.config import ConfigSection, flag, parse_flags
from megatron.errors import LaunchError

SOURCES = Path(__file__).resolve().parent.parent / "csrc" / "ops"
_ENTRY = re.compile(r"Compiling entry function '(?P<name>\S+)' for 'sm_(?P<architecture>\w+)'")
_SPILLS = re.compile(r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")
_USED = re.compile(r"Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?")
_NAMESPACE = re.compile(r"\(anonymous namespace\)::|megatron::")


@dataclass(frozen=True)
class ResourceFlags(ConfigSection):
    """Flags of this program."""

    architectures: str = flag("80,90,100", "compute capabilities; one that nvcc does not know is left out")
    only: tuple[str, ...] = flag((), "operations, by their folders in csrc/ops; all if not given", nargs="+")
    jobs: int = flag(2, "compilers at the same time", at_least=1)


@dataclass(frozen=True)
class Kernel:
    """One instance of a kernel.

    Attributes:
        name: with its template arguments, without namespaces and parameters.
        spilled_bytes: stores to local memory of a thread.
        shared_bytes: static shared memory of a block; what a launch asks for comes on top.
    """

    operation: str
    name: str
    architecture: str
    registers: int
    spilled_bytes: int
    shared_bytes: int

    @property
    def plain_name(self) -> str:
        """The name without template arguments."""
        return self.name.partition("<")[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles and prints the table."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = parse_flags(ResourceFlags, words, prog="kernel_resources.py", description=__doc__ or "")
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise LaunchError("nvcc is not on PATH. Install a CUDA toolkit; a GPU is not needed.")
    known = _architectures(nvcc)
    chosen = [name for name in flags.architectures.split(",") if name in known]
    sources = [path for path in sorted(SOURCES.glob("*/*.cu")) if not flags.only or path.parent.name in flags.only]
    with ThreadPoolExecutor(flags.jobs) as pool:
        jobs = [(nvcc, source, architecture) for source in sources for architecture in chosen]
        kernels = [kernel for found in pool.map(lambda job: compile_one(*job), jobs) for kernel in found]
    print("\n".join(markdown(kernels)), flush=True)
    return 0


def compile_one(nvcc: str, source: Path, architecture: str) -> list[Kernel]:
    """Compiles a source for one architecture.

    Raises:
        LaunchError: it does not compile.
    """
    from megatron.kernels.native.compilers import EXACT_OPERATIONS, Toolchain

    with tempfile.TemporaryDirectory() as folder:
        tools = Toolchain("", Path(), nvcc=nvcc, architectures=(architecture,))
        is_exact = source.parent.name in EXACT_OPERATIONS
        command = tools.compile_device(SOURCES, source, Path(folder) / "kernel.o", is_exact=is_exact)
        done = subprocess.run([*command, "-Xptxas", "-v"], capture_output=True, text=True, check=False)
    printed = done.stderr + done.stdout  # where the assembler writes differs between versions
    if done.returncode:
        raise LaunchError(f"{source.name} does not compile for sm_{architecture}:\n{printed[-2000:]}")
    return parse_resources(source.parent.name, printed)


def parse_resources(operation: str, printed: str) -> list[Kernel]:
    """The kernels that the assembler names in what it prints."""
    found: list[tuple[str, str, int, int, int]] = []
    name, architecture, spilled = "", "", 0
    for line in printed.splitlines():
        if entry := _ENTRY.search(line):
            name, architecture, spilled = entry["name"], entry["architecture"], 0
        elif spills := _SPILLS.search(line):
            spilled = int(spills["stores"])
        elif name and (used := _USED.search(line)):
            found.append((name, architecture, int(used["registers"]), spilled, int(used["shared"] or 0)))
            name = ""
    readable = demangled([kernel[0] for kernel in found])
    return [Kernel(operation, text, *kernel[1:]) for text, kernel in zip(readable, found, strict=True)]


def demangled(names: Sequence[str]) -> list[str]:
    """C++ names as they are written, without namespaces, return type and parameters; as they are without c++filt."""
    program = shutil.which("cu++filt") or shutil.which("c++filt")
    if program is None or not names:
        return list(names)
    done = subprocess.run([program], input="\n".join(names), capture_output=True, text=True, check=True)
    return [_short(line) for line in done.stdout.splitlines()]


def markdown(kernels: Iterable[Kernel]) -> Iterator[str]:
    """A line per kernel, with the most that any instance takes on each architecture."""
    table: dict[tuple[str, str], dict[str, list[Kernel]]] = {}
    for kernel in kernels:
        row = table.setdefault((kernel.operation, kernel.plain_name), {})
        row.setdefault(kernel.architecture, []).append(kernel)
    architectures = sorted({name for row in table.values() for name in row}, key=lambda name: int(name.rstrip("af")))
    headings = [f"sm_{name}" for name in architectures]
    yield f"| operation | kernel | instances | {' | '.join(headings)} | shared, bytes | spills, bytes |"
    yield "|---|---|" + "---|" * (len(architectures) + 3)
    for (operation, kernel_name), row in table.items():
        every = [kernel for instances in row.values() for kernel in instances]
        registers = [
            str(max(kernel.registers for kernel in row[name])) if name in row else "" for name in architectures
        ]
        count = max(map(len, row.values()))
        shared, spilled = max(kernel.shared_bytes for kernel in every), max(kernel.spilled_bytes for kernel in every)
        yield f"| {operation} | {kernel_name} | {count} | {' | '.join(registers)} | {shared} | {spilled} |"


def _short(name: str) -> str:
    """Drops namespaces, the return type and the parameters of a demangled name."""
    name = _NAMESPACE.sub("", name)
    depth = 0
    for place, character in enumerate(name):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0:
            name = name[:place]
            break
    return name.removeprefix("void ")


def _architectures(nvcc: str) -> set[str]:
    done = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=False)
    return {line.strip().removeprefix("sm_") for line in done.stdout.splitlines()}


if __name__ == "__main__":
    process_exit.exit_with(main)
