"""Runs of corpus tools in this process; a test of a process itself starts one."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.errors import MegatronError


def run_tool(main: Callable[[Sequence[str]], int], folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Runs the main function of a tool in a folder; returns exit code and outputs as a process would."""
    arguments, before, outside = list(map(str, words)), signal.getsignal(signal.SIGTERM), Path.cwd()
    with (
        contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")) as output,
        contextlib.redirect_stderr(io.TextIOWrapper(io.BytesIO(), "utf-8")) as errors,
    ):
        os.chdir(folder)
        try:
            code = int(main(arguments))
        except MegatronError as failure:
            code = int(failure.exit_code)
            errors.write(f"error: {failure}\n")
        finally:
            os.chdir(outside)
            signal.signal(signal.SIGTERM, before)
    for stream in (output, errors):
        stream.seek(0)
    return subprocess.CompletedProcess(arguments, code, output.read(), errors.read())
