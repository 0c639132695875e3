"""The toolchain of a build of `csrc/ops`: compilers, flags and commands."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.device import environment
from megatron.errors import ConfigError, LaunchError

_HOST_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"),
    *("-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-DAT_PER_OPERATOR_HEADERS"),
)
_DEVICE_FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=default", "--extended-lambda")
# Operations with bitwise reproducible results: products and sums must not be fused.
EXACT_OPERATIONS = frozenset({"dropout_add", "initial_values"})


@dataclass(frozen=True)
class Toolchain:
    """The compilers of a build.

    Attributes:
        host: the C++ compiler, possibly with a prefix such as ccache.
        nvcc: the CUDA compiler; None to build for the CPU only.
        architectures: compute capabilities to build for, such as "90".
        native: build for the CPU of this machine only, instead of several instruction sets.
    """

    host: tuple[str, ...]
    torch_folder: Path
    native: bool = False
    nvcc: str | None = None
    architectures: tuple[str, ...] = ()

    def compile_host(self, sources: Path, source: Path, result: Path, *, is_exact: bool) -> list[str]:
        """The command to compile a `.cpp` file, whose operations are either all exact or all not."""
        include = self.torch_folder / "include"
        command = [*self.host, *_HOST_FLAGS, f"-ffp-contract={'off' if is_exact else 'fast'}"]
        command += ["-march=native", "-DMEGATRON_NATIVE"] if self.native else []
        command += ["-I", str(sources), "-isystem", str(include)]
        if self.nvcc is not None:
            command += ["-DMEGATRON_WITH_CUDA", "-isystem", str(_cuda_home(self.nvcc) / "include")]
        return [*command, "-c", str(source), "-o", str(result)]

    def compile_device(self, sources: Path, source: Path, result: Path, *, is_exact: bool) -> list[str]:
        """The command to compile a `.cu` file for every architecture."""
        targets = [f"-gencode=arch=compute_{code},code=sm_{code}" for code in self.architectures]
        exact = ["--fmad=false"] if is_exact else []
        command = [str(self.nvcc), *_DEVICE_FLAGS, *targets, *exact]
        return [*command, "-I", str(sources), "-c", str(source), "-o", str(result)]

    def link(self, objects: Sequence[Path], result: Path) -> list[str]:
        """The command to link the library."""
        folder = self.torch_folder / "lib"
        command = [*self.host, "-shared", *map(str, objects), f"-L{folder}", "-ltorch", "-ltorch_cpu", "-lc10"]
        if self.nvcc is not None:
            command += ["-ltorch_cuda", "-lc10_cuda", f"-L{_cuda_home(self.nvcc) / 'lib64'}", "-lcudart"]
        return [*command, f"-Wl,-rpath,{folder}", "-o", str(result)]


def find_toolchain(cuda: str, architectures: tuple[str, ...], *, native: bool = False) -> Toolchain:
    """Finds the compilers.

    Args:
        cuda: `yes`, `no`, or `auto`: if nvcc and a torch with CUDA are installed.

    Raises:
        ConfigError: an architecture is not a compute capability.
        LaunchError: a required compiler is missing.
    """
    unknown = [code for code in architectures if not (code.isdigit() and len(code) in (2, 3))]
    if unknown:
        raise ConfigError(
            f"--architectures {','.join(architectures)}: {unknown[0]!r} is not a compute capability. Write them as "
            "80,90."
        )
    host = (
        shlex.split(environment("CXX") or "")
        or [path for path in map(shutil.which, ("g++", "c++", "clang++")) if path][:1]
    )
    if not host:
        raise LaunchError(
            "No C++ compiler found (CXX is not set, and neither g++ nor clang++ is on PATH). Install one, "
            "for example with `apt-get install g++`, and build again."
        )
    torch_folder = Path(torch.__file__).parent
    if cuda == "no":
        return Toolchain(tuple(host), torch_folder, native)
    nvcc = _find_nvcc()
    missing = []
    if nvcc is None:
        missing.append("nvcc is neither on PATH nor in CUDA_HOME")
    if torch.version.cuda is None:
        missing.append(f"torch {torch.__version__} was built without CUDA")
    if missing and cuda == "yes":
        raise LaunchError(
            f"Cannot build GPU kernels: {', and '.join(missing)} (--cuda yes). Install a CUDA toolkit and "
            "a torch with CUDA, or build for the CPU only: --cuda no."
        )
    if missing:
        return Toolchain(tuple(host), torch_folder, native)
    return Toolchain(tuple(host), torch_folder, native, nvcc, architectures)


def _find_nvcc() -> str | None:
    home = _named_cuda_home()
    named = None if home is None else home / "bin" / "nvcc"
    return str(named) if named is not None and os.access(named, os.X_OK) else shutil.which("nvcc")


def _cuda_home(nvcc: str) -> Path:
    return _named_cuda_home() or Path(nvcc).resolve().parent.parent


def _named_cuda_home() -> Path | None:
    home = environment("CUDA_HOME") or environment("CUDA_PATH")
    return Path(home) if home else None
