"""Makes one file of the compiled modules that a start of the trainer imports: a rank opens one file and not 2,000.

Many ranks that open the same thousands of small files at once are what a parallel file system is slowest at.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from megatron import log
from megatron.errors import LaunchError
from megatron.files.replacing import replace_file
from megatron.launch.bundles.running import MAGIC, BundleFinder

_ROOT = Path(__file__).resolve().parents[3]
# What a start of the trainer imports; the process that collects ends without training.
_COLLECT = """
import importlib, json, marshal, os, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[3:]:
    importlib.import_module(name)
modules, codes, place = {}, [], 0
for name, module in sorted(sys.modules.items()):
    spec = getattr(module, "__spec__", None)
    if name == "__main__" or spec is None or type(spec.loader).__name__ != "SourceFileLoader" or spec.name != name:
        continue
    code = marshal.dumps(spec.loader.get_code(name))
    state = os.stat(spec.origin)
    is_package = spec.submodule_search_locations is not None
    modules[name] = [spec.origin, is_package, place, len(code), state.st_mtime_ns, state.st_size]
    codes.append(code)
    place += len(code)
with open(sys.argv[2], "wb") as file:
    index = json.dumps({"prefix": sys.prefix, "modules": modules}).encode()
    file.write(len(index).to_bytes(8, "big") + index + b"".join(codes))
"""
_IMPORTED = (
    "megatron.train.preflight.checks",
    "megatron.train.build",
    "megatron.train.loop",
    "megatron.train.signals",
    "megatron.parallel.rank_start",
)


def ensure_bundle(path: Path, python: str, imported: tuple[str, ...] = _IMPORTED) -> None:
    """Makes the bundle, unless it is there and no source has changed since.

    Args:
        python: the interpreter of the ranks.

    Raises:
        LaunchError: it cannot be made or written.
    """
    if _is_current(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    collected = path.with_name(f".{path.name}-{os.getpid()}")
    command = [python, "-c", _COLLECT, str(_ROOT), str(collected), *imported]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            why = made.stderr.strip().rpartition("\n")[2]
            raise LaunchError(
                f"--bundle {path} cannot be made: {python} cannot import what the trainer needs: {why}. Give --python "
                "the interpreter of the project's environment."
            )
        content = collected.read_bytes()
        replace_file(path, MAGIC + importlib.util.MAGIC_NUMBER + content)
    except OSError as failure:
        raise LaunchError(
            f"--bundle {path} cannot be written: {failure.strerror or failure}. Give a file that all hosts can read."
        ) from failure
    finally:
        collected.unlink(missing_ok=True)
    log.info(f"bundle: {path}, {len(BundleFinder(str(path)).modules)} modules, {len(content) / 2**20:.0f} MiB")


def bundled_command(path: Path) -> list[str]:
    """What stands before a program and its flags, so that it runs with the bundle."""
    return [str(Path(sys.modules[BundleFinder.__module__].__file__ or "")), str(path)]


def _is_current(path: Path) -> bool:
    """Whether each module's source is as it was when the bundle was made."""
    try:
        modules = BundleFinder(str(path)).modules
        for source, _, _, _, changed_at, size in modules.values():
            state = os.stat(str(source))
            if (state.st_mtime_ns, state.st_size) != (changed_at, size):
                return False
    except (OSError, ValueError, KeyError):
        return False
    return bool(modules)
