"""Measures the parts of a page, each in a process of its own, and writes JSON lines and Markdown.

    python -m benchmarks.gpu --output FOLDER --parts build,tests,ops --minutes 20

By default all parts in the order of their importance, as many as nine minutes hold. What is not begun when the time is
up is named, with the command that goes on. After each part everything so far lies in one archive, `gpu-page.tar.gz`.
`--page FILE...` only renders the page of such results; with `--constants FILE.json` it also writes what `--device
FILE.json` of the planner reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.constants import write_constants
from benchmarks.gpu.context import DECIDING, FULL, TINY, Context
from benchmarks.gpu.machine import ROOT, describe
from benchmarks.gpu.parts import PARTS, SCRIPT_MINUTES, SCRIPTS
from benchmarks.gpu.records import RESULTS, Recorder, page, read_records, write_page
from megatron import log, process_exit
from megatron.config import ConfigSection, flag, parse_flags
from megatron.errors import ConfigError

ARCHIVE = "gpu-page.tar.gz"
_GRACE_SECONDS = 10.0  # for a part that ends by itself when its time is up


@dataclass(frozen=True)
class PageFlags(ConfigSection):
    """Flags of this program."""

    output: str = flag("gpu-page", "folder of the results; results of earlier parts are kept")
    parts: str = flag("all", f"which parts, separated by commas: {', '.join(PARTS)}")
    script: str | None = flag(
        None,
        f"first: {SCRIPTS['first']}; second: {SCRIPTS['second']}; in {SCRIPT_MINUTES} minutes each",
        choices=tuple(SCRIPTS),
    )
    minutes: float = flag(9.0, "time for all of them; none begins with less than a quarter of its own time left")
    contenders: tuple[str, ...] = flag(DECIDING, "who is compared in training, in this order", nargs="+")
    scale: str = flag(FULL, "sizes: full, or tiny to try the harness", choices=(FULL, TINY))
    device: str = flag("cuda", "the device", choices=("cuda", "cpu"))
    kernels: str | None = flag(None, "implementations of operations in our runs, as pretrain_gpt.py takes them")
    commit: str | None = flag(None, "the commit to print, where the files come without their repository")
    only_this: str | None = flag(None, "run one part in this process", choices=tuple(PARTS))
    contender: str | None = flag(None, "of that part one contender, which waits for a line of input")
    seconds: float = flag(600.0, "time of that part")
    page: tuple[str, ...] = flag((), "only render the page of these files", nargs="+")
    constants: str | None = flag(None, "JSON file to write the planner's constants to, from the files of --page")

    def problems(self) -> Iterator[str]:
        if self.constants is not None and not self.page:
            yield f"--constants {self.constants} needs --page FILE...: the results to take the constants from."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = parse_flags(PageFlags, words, prog="python -m benchmarks.gpu", description=__doc__ or "")
    if flags.page:
        records = read_records([Path(name) for name in flags.page])
        print("\n".join(page(records)))
        if flags.constants is not None:
            write_constants(records, Path(flags.constants))
        return 0
    output = Path(flags.output)
    output.mkdir(parents=True, exist_ok=True)
    device = torch.device(flags.device)
    if flags.only_this is not None:
        settings = flags.scale, flags.seconds, flags.kernels, flags.contenders, flags.contender
        context = Context(flags.only_this, output, device, *settings)
        PARTS[flags.only_this].run(context)
        return 0
    if not (output / RESULTS).exists():
        recorder = Recorder(output, "machine")
        for name, value in describe(device, flags.commit).items():
            recorder.note(name, str(value))
    if flags.script is not None:
        flags = dataclasses.replace(flags, parts=SCRIPTS[flags.script], minutes=SCRIPT_MINUTES)
    run_parts(flags, chosen_parts(flags.parts), lambda name, seconds: _as_process(flags, name, seconds))
    return 0


def chosen_parts(names: str) -> list[str]:
    """The parts of a list separated by commas, in the order in which they run.

    Raises:
        ConfigError: one is not known.
    """
    wanted = list(PARTS) if names == "all" else [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        raise ConfigError(f"--parts {names}: unknown part {', '.join(unknown)}. Use {', '.join(PARTS)}, or all.")
    return [name for name in PARTS if name in wanted]


def run_parts(flags: PageFlags, names: Sequence[str], run: Callable[[str, float], int]) -> None:
    """Runs parts until the time is up; after each the page is rendered and the archive written."""
    output, ends_at = Path(flags.output), time.monotonic() + 60 * flags.minutes - _GRACE_SECONDS
    for place, name in enumerate(names):
        left = ends_at - time.monotonic()
        if left < PARTS[name].seconds / 4:
            rest = ",".join(names[place:])
            Recorder(output, name).note("not run", f"time was up; go on with --parts {rest}")
            write_page(output)
            write_archive(output)
            log.line(f"time is up; go on with --minutes {flags.minutes:g} --parts {rest}")
            return
        began_at = time.monotonic()
        status = run(name, min(PARTS[name].seconds, left))
        recorder = Recorder(output, name)
        if status:
            recorder.note("ended early", f"exit status {status}; see {name}.log")
        recorder.figure("time of the part", time.monotonic() - began_at, "s")
        write_page(output)
        write_archive(output)
        log.line(f"{name}: {time.monotonic() - began_at:.0f} s")


def write_archive(output: Path) -> None:
    """Packs the results, the page, the logs and the trace of a folder; a reader sees the old archive or the new one."""
    packed = output / f".{ARCHIVE}"
    with tarfile.open(packed, "w:gz") as archive:
        for path in sorted(output.iterdir()):
            if path.is_file() and path.suffix in (".jsonl", ".md", ".log", ".gz") and ARCHIVE not in path.name:
                archive.add(path, arcname=f"gpu-page/{path.name}")
    packed.replace(output / ARCHIVE)


def _as_process(flags: PageFlags, name: str, seconds: float) -> int:
    """Runs a part as a process, so that its failure, its memory and its hangs are its own.

    Nothing that it started outlives it: it would hold memory of the GPU, and time.
    """
    command = [sys.executable, "-u", "-m", "benchmarks.gpu", "--only-this", name, "--seconds", str(seconds)]
    for option in ("output", "scale", "device", "kernels"):
        value = getattr(flags, option)
        command += [] if value is None else [f"--{option}", str(Path(value).resolve() if option == "output" else value)]
    command += ["--contenders", *flags.contenders]
    with (Path(flags.output) / f"{name}.log").open("a", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            return process.wait(seconds + _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    process_exit.exit_with(main)
