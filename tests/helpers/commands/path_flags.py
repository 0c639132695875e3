"""What every program does with a pipe at one of its path flags, as JSON.

    python -m tests.helpers.commands.path_flags FOLDER

All programs run in this one process, which has little memory and an alarm, as far as they read their command lines.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from megatron.config.flags import command_line
from megatron.config.flags.fields import Flag
from megatron.config.flags.legacy import legacy_flags
from megatron.errors import MegatronError

ROOT = Path(__file__).resolve().parents[3]
# Programs with sub-commands.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "tools/checkpoints.py": ("list", "inspect", "verify", "copy", "average", "prune"),
    "tools/corpus/corpus_store.py": ("import", "stat", "bench", "fetch", "lengths"),
}
# Programs that read no flag of their own, or pass all they read on to another of these.
WITHOUT_FLAGS = frozenset({"examples/gpt2_all_in/dev_corpus.py"})
_PATTERNS = (
    "*.py",
    "tools/**/*.py",
    "tasks/main.py",
    "tasks/eval_harness/*.py",
    "examples/*.py",
    "examples/*/*.py",
    "docs/site/*.py",
)
_SECONDS = 60
_FEW_FLAGS = 100
_MEMORY_BYTES = 8 << 30  # of address space, of which libraries map much and use little


class _ReadError(Exception):
    """Ends a program at the point where it reads its command line."""


def programs() -> list[str]:
    """Every file of the project that is started, but for setup.py."""
    paths = sorted({path for pattern in _PATTERNS for path in ROOT.glob(pattern)})
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return [name for name, text in texts.items() if "__main__" in text and name not in {"setup.py", *WITHOUT_FLAGS}]


def calls() -> list[tuple[str, list[str]]]:
    """(program, its sub-command)."""
    return [(name, [word] if word else []) for name in programs() for word in COMMANDS.get(name, ("",))]


def flags_of_program(module: ModuleType, words: Sequence[str]) -> dict[str, Flag]:
    """The flags that a program reads, by destination."""
    seen: list[Mapping[str, Flag]] = []

    def build(flags: Mapping[str, Flag], *_: Any) -> NoReturn:
        seen.append(flags)
        raise _ReadError

    original, command_line._build_parser = command_line._build_parser, build
    try:
        with contextlib.suppress(_ReadError):
            _run(module, words)
    finally:
        command_line._build_parser = original
    return dict(seen[0]) if seen else {}


def load(program: str) -> ModuleType:
    """The module of a program, which is not run."""
    path = ROOT / program
    for folder in (str(ROOT), str(path.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    if path.parent == ROOT:
        return importlib.import_module(path.stem)
    spec = importlib.util.spec_from_file_location("program_" + program.replace("/", "_")[:-3], path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _run(module: ModuleType, words: Sequence[str]) -> None:
    sys.argv = [str(module.__file__), *words]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        module.main()


def _answer(module: ModuleType, words: Sequence[str]) -> str:
    signal.alarm(_SECONDS)
    try:
        _run(module, words)
    except MegatronError as failure:
        return str(failure)
    except SystemExit as failure:
        return f"exit {failure.code}"
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    finally:
        signal.alarm(0)
    return "no error"


def _values(flag: Flag, pipe: str) -> list[str]:
    return [pipe] * (flag.count or 1) if flag.is_tuple else [pipe]


def _late(*_: Any) -> NoReturn:
    raise TimeoutError(f"no answer in {_SECONDS} seconds")


def main() -> None:
    """Prints, for every program, its flags that take a text, and what it says of a pipe at those that take a path."""
    pipe = sys.argv[1]
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _late)
    out = []
    legacy = {entry.flag.field for entry in legacy_flags().values()}
    for program, words in calls():
        module = load(program)
        flags = flags_of_program(module, words)
        texts = [flag for flag in flags.values() if flag.element is str and not flag.facts.choices]
        texts = [flag for flag in texts if flag.field not in legacy and not flag.facts.ignored]
        paths = [flag for flag in texts if flag.facts.path is not None]
        # All flags of the trainer are read by the same function: one program shows all of them, the others one.
        asked = paths if len(flags) < _FEW_FLAGS or program == "pretrain_gpt.py" else paths[:1]
        out.append(
            {
                "program": " ".join([program, *words]),
                "flags": {flag.positive_name: flag.facts.help for flag in texts if flag.facts.path is None},
                "paths": {flag.positive_name: str(flag.facts.path and flag.facts.path.name) for flag in paths},
                "answers": {
                    flag.positive_name: _answer(module, [*words, flag.positive_name, *_values(flag, pipe)])
                    for flag in asked
                },
            }
        )
    print(json.dumps(out))


if __name__ == "__main__":
    main()
