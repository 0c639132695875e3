"""Which lines of an operation's kernels have run in this process, as gcov counted them in the plain build."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

from csrc.emulator.harness import builds

NOTES = "kernels.gcno"
COUNTS = "kernels.gcda"


def count_later(library: ctypes.CDLL, path: Path) -> None:
    """Arranges that the counts of a library go to a folder of this process, not to where it was built."""
    _counts_folder(path)  # removed after the last dump: what is registered first happens last
    atexit.register(_dump, library, path)


def unexecuted_lines(library: ctypes.CDLL, path: Path, folder: Path) -> list[str]:
    """The lines of sources in `folder` that hold code and have not run, as `norm.cu:12: text`."""
    _dump(library, path)
    counts = _counts_folder(path)
    shutil.copy(path.with_name(NOTES), counts)
    command = ["gcov", "--json-format", "--stdout", COUNTS]
    output = subprocess.run(command, cwd=counts, capture_output=True, text=True, check=True, timeout=120).stdout
    missing = []
    for file in json.loads(output)["files"]:
        source = Path(builds.ROOT, file["file"])
        if source.parent != folder:
            continue
        times: Counter[int] = Counter()  # a line of a template is listed once for each instance
        for line in file["lines"]:
            times[line["line_number"]] += line["count"]
        text = source.read_text().splitlines()
        missing += [f"{source.name}:{n}: {text[n - 1].strip()}" for n, count in sorted(times.items()) if not count]
    return missing


@cache
def _counts_folder(path: Path) -> Path:
    folder = tempfile.mkdtemp(prefix="simt-coverage-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _dump(library: ctypes.CDLL, path: Path) -> None:
    """Adds the counts since the last time to those in the folder."""
    before = dict(os.environ)
    os.environ.update(GCOV_PREFIX=str(_counts_folder(path)), GCOV_PREFIX_STRIP="99")
    try:
        library.simt_dump_coverage()
        library.simt_reset_coverage()
    finally:
        os.environ.clear()
        os.environ.update(before)
