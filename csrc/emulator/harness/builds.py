"""Compiles the emulator's runtime and the kernels, into a cache named by what went into it.

A library is built in a folder of its own, which is then renamed: processes that build the same one at the same time
do so twice, and none waits for a lock.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
SIMT = Path(__file__).resolve().parents[1]
OPERATIONS = ROOT / "csrc" / "ops"
OBJECT = "kernels.o"
LIBRARY = "kernels.so"
SYMBOLS = "symbols.txt"
RUNTIME = "libsimt.so"
COMPILE_SECONDS = 300
UNUSED_DAYS = 14

LANGUAGE = ("-std=c++17", "-fPIC", "-g1", "-Wall", "-Wno-unknown-pragmas", "-ffp-contract=off")
# A static of a template would otherwise be one for all libraries of the process, and one with a guard a false write.
KERNEL = ("-DMEGATRON_SIMT", "-O1", "-fno-gnu-unique", "-fno-threadsafe-statics", "-Wno-unused-function")
CHECKED = (
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
    "-fsanitize=alignment,bounds,integer-divide-by-zero,shift,signed-integer-overflow",
)
PLAIN = ("--coverage", "-DMEGATRON_SIMT_COVERAGE")
# As nvcc and the host compiler do by default, products and sums are one operation where they can be.
FUSED = ("-mfma", "-ffp-contract=fast", "-DMEGATRON_SIMT_FUSED")
# How a build is compiled and how it is linked: the sanitizers' own libraries stay out, the runtime takes their place.
BUILDS = {
    "checked": (CHECKED, ("-Wl,--wrap=memcpy,--wrap=memmove,--wrap=memset",)),
    "plain": (PLAIN, ("--coverage",)),
    "fused": (FUSED, ()),
}


class BuildError(Exception):
    """A source does not compile for the emulator; the message is the compiler's."""


@cache
def compiler() -> str:
    """The path of g++; skips the test where there is none that can do it."""
    found = shutil.which("g++")
    if found is None:
        pytest.skip("the emulator compiles kernels with g++, which is not installed")
    if not sys.platform.startswith("linux"):
        pytest.skip(f"the emulator needs ELF libraries and Linux signals; this is {sys.platform}")
    return found


@cache
def _compiler_version() -> str:
    return subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout


@cache
def runtime() -> Path:
    """The emulator's runtime, one library for all kernels of a process."""
    parts = sorted((SIMT / "runtime").glob("*.cpp"))
    headers = [*(SIMT / "runtime").glob("*.h"), *(SIMT / "include").glob("*.h")]
    command = [compiler(), *LANGUAGE, "-O2", "-Wextra", "-Werror", "-shared"]
    key = _key(command, [*parts, *headers])

    def build(folder: Path) -> None:
        together = folder / "runtime.cpp"  # one translation unit, for the time that its headers take
        together.write_text("".join(f'#include "{part}"\n' for part in parts))
        _run([*command, "-o", RUNTIME, str(together)], folder)

    return _cached("runtime", key, build) / RUNTIME


@cache
def kernels(source: Path, build: str) -> Path:
    """The library of one `.cu` file, in a build of `BUILDS`.

    Raises:
        BuildError: it does not compile.
    """
    operations = source.parents[1] if (source.parents[1] / "base").is_dir() else OPERATIONS
    sources = [source, *source.parent.glob("*.h"), *operations.rglob("*.h")]
    library = runtime()
    compiled, linked = BUILDS[build]
    command = [compiler(), *LANGUAGE, *KERNEL, *compiled, f"-I{SIMT / 'include'}"]
    link = [compiler(), "-shared", "-o", LIBRARY, OBJECT, *linked, str(library), f"-Wl,-rpath,{library.parent}"]
    parts = [*sources, *(SIMT / "include").glob("*.h")]
    key = _key([*command, *link, str(source)], parts)

    def compile_in(target: Path) -> None:
        _run([*command, f"-I{operations}", "-c", "-x", "c++", str(source), "-o", OBJECT], target)
        _run(link, target)
        _run(["nm", "--print-size", "--defined-only", LIBRARY], target, SYMBOLS)

    return _cached(f"{source.stem}-{build}", key, compile_in) / LIBRARY


@cache
def binding(operation: str) -> Path:
    """The library that torch loads for an operation of `csrc/ops`, with the emulator in place of CUDA."""
    library, source = kernels(OPERATIONS / operation / f"{operation}.cu", "fused"), OPERATIONS / operation
    torch_folder = Path(torch.__file__).parent
    parts = [source / f"{operation}.cpp", *source.glob("autograd.cpp")]
    command = [compiler(), "-std=c++20", "-O0", "-fPIC", "-shared", "-DMEGATRON_WITH_CUDA", "-DMEGATRON_SIMT"]
    command += ["-DMEGATRON_NATIVE", "-DAT_PER_OPERATOR_HEADERS", "-I", str(OPERATIONS)]
    command += ["-isystem", str(torch_folder / "include"), "-o", LIBRARY, *map(str, parts)]
    command += [str(library), f"-Wl,-rpath,{library.parent}", f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]

    def compile_in(target: Path) -> None:
        _run(command, target)

    key = _key([*command, torch.__version__], [*parts, *OPERATIONS.rglob("*.h")])
    return _cached(f"{operation}-binding", key, compile_in) / LIBRARY


def changed_operations(file: str, text: str, replacement: str) -> Path:
    """A copy of `csrc/ops` in which `text`, which is in `file` once, is replaced.

    Raises:
        ValueError: the text is not there, or more than once.
    """
    path = OPERATIONS / file
    content = path.read_text()
    if content.count(text) != 1:
        raise ValueError(f"{file} has {content.count(text)} times, not once: {text}")

    def copy(folder: Path) -> None:
        shutil.copytree(OPERATIONS, folder / "ops")
        (folder / "ops" / file).write_text(content.replace(text, replacement))

    every = [source for source in OPERATIONS.rglob("*") if source.suffix in (".cu", ".h")]
    return _cached("changed", _key([file, text, replacement], every), copy) / "ops"


def _run(command: list[str], folder: Path, output: str = "") -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
    if output:
        (folder / output).write_text(done.stdout)


def _key(command: list[str], sources: list[Path]) -> str:
    digest = hashlib.sha256("\0".join([_compiler_version(), *command]).encode())
    for path in sorted(sources):
        digest.update(f"\0{path}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:24]


@cache
def _cache_folder() -> Path:
    folder = Path(sys.prefix, ".trident-megatron", "simt")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        folder = Path(tempfile.gettempdir(), f"trident-megatron-simt-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
    _delete_unused(folder)
    return folder


def _delete_unused(folder: Path) -> None:
    oldest = time.time() - UNUSED_DAYS * 86400
    for entry in folder.iterdir():
        try:
            if entry.stat().st_mtime < oldest:
                shutil.rmtree(entry, ignore_errors=True)
        except FileNotFoundError:
            continue  # another process deletes as well


def _cached(name: str, key: str, build: Callable[[Path], None]) -> Path:
    final = _cache_folder() / f"{name}-{key}"
    if final.is_dir():
        os.utime(final)
        return final
    temporary = Path(tempfile.mkdtemp(prefix=f"{name}-building-", dir=_cache_folder()))
    try:
        build(temporary)
        os.rename(temporary, final)
    except OSError:
        if not final.is_dir():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final
