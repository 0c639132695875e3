"""Command lines and their outcomes, as listed in `golden/refusals.txt` and `golden/values.txt`.

A line has flags that follow the small command line and, each after " | ":

* `without FLAGS`: flags of the small command line to omit; `alone` omits all of them.
* `file NAME TEXT`: a file in the current folder.
* `on 2 processes`, `on 1 process with a GPU`, `on 8 processes with a GPU and bfloat16`: resolved there. A CPU has
  bfloat16, a GPU float16 and, where named, bfloat16.
* `of 50000 tokens`: resolved with such a tokenizer.
* `after FLAGS`: resumed from a checkpoint of the small command line with these flags.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import shlex
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from megatron.config import Machine, RunConfig, RunRequest, TokenizerFacts, check_resume, resolve
from megatron.config.parse import read_flags
from megatron.config.run_config import sections_of
from megatron.errors import ConfigError
from tests.config.command_lines import words

REFUSALS, VALUES = (Path(__file__).resolve().parent / "golden" / name for name in ("refusals.txt", "values.txt"))


def outcome(line: str) -> RunRequest | list[str]:
    """The requested or resolved run of a line, or its problems."""
    text, *more = (part.strip() for part in f" {line}".split(" | "))
    options = dict(part.partition(" ")[::2] for part in more)
    with _empty_folder():
        for part in more:
            if part.startswith("file "):
                _, name, content = part.split(" ", 2)
                Path(name).write_text(content, encoding="utf-8")
        draft = read_flags(shlex.split(text) if "alone" in options else words(text, options.get("without", "")))
        if draft.problems:
            return list(draft.problems)
        try:
            if not options.keys() & {"on", "after"}:
                return draft.request()
            size = int(options.get("of", "1000").split()[0])
            machine = _machine(options.get("on", "1 process"))
            run = resolve(draft.request(), machine, TokenizerFacts(size, size - 1, "f"))
            if "after" not in options:
                return run
            saved = read_flags(words(options["after"])).request()
            return check_resume(resolve(saved, machine, TokenizerFacts(1000, 999, "f")).to_json(), run)
        except ConfigError as failure:
            return list(failure.problems)


@contextlib.contextmanager
def _empty_folder() -> Iterator[None]:
    """Changes to a new folder for as long as the context lasts."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def _machine(text: str) -> Machine:
    is_gpu = "GPU" in text
    return Machine("cuda" if is_gpu else "cpu", int(text.split()[0]), is_gpu, not is_gpu or "bfloat16" in text)


def sentences(line: str) -> list[str]:
    """The problems of a line, or the notices with a ~ and the reasons of ignored flags with a - in front."""
    run = outcome(line)
    if isinstance(run, list):
        return run
    return [*(f"~ {notice}" for notice in run.notices), *(f"- {reason}" for reason in run.ignored)]


def values(line: str) -> list[str]:
    """The sentences of a line and, by section, the values that differ from those of the small command line."""
    run = outcome(line)
    if isinstance(run, list):
        return run
    usual = _usual(isinstance(run, RunConfig))
    changed = {
        section: {name: text for name, text in shown.items() if usual[section].get(name) != text}
        for section, shown in _shown(run).items()
    }
    listed = [
        f"{section}: {', '.join(f'{name} {text}' for name, text in shown.items())}"
        for section, shown in changed.items()
        if shown
    ]
    return [*sentences(line), *listed]


@cache
def _usual(is_resolved: bool) -> dict[str, dict[str, str]]:
    run = outcome("| on 1 process" if is_resolved else "")
    assert isinstance(run, RunRequest)
    return _shown(run)


def _shown(run: RunRequest) -> dict[str, dict[str, str]]:
    """The fields and the computed properties by section."""
    shown: dict[str, dict[str, str]] = {"run": {"activation": run.requested_kernels["activation"]}}
    for section in sections_of(type(run)):
        found, values = shown.setdefault(section, {}), getattr(run, section)
        properties = [name for name, _ in inspect.getmembers(type(values), lambda member: isinstance(member, property))]
        for name in [*vars(values), *properties]:
            with contextlib.suppress(ConfigError, TypeError, ValueError, ZeroDivisionError):
                found[name] = str(getattr(values, name))
    return shown


def golden_text(path: Path) -> str:
    """The file as it should be."""
    shown = values if path == VALUES else sentences
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("    "):
            found = [] if line.startswith("# ") else shown(line)
            lines += [line, *(f"    {sentence}" for sentence in found)]
    return "".join(f"{line}\n" for line in lines)
