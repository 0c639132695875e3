"""Command lines that rules refuse, in `golden/refusals.txt`, and what is said of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from megatron.config import Machine, TokenizerFacts, resolve
from megatron.config.parse import read_flags
from megatron.errors import ConfigError
from tests.config.command_lines import words

GOLDEN = Path(__file__).resolve().parent / "golden" / "refusals.txt"


def sentences(line: str) -> list[str]:
    """What is said of a command line: the problems, or the notices with a ~ in front.

    Args:
        line: flags that follow the small command line; then, each after " | ", the flags that it goes `without`, and
            the processes that the run is resolved `on`.
    """
    text, *more = line.split(" | ")
    drop = next((part.removeprefix("without ") for part in more if part.startswith("without ")), "")
    draft = read_flags(words(text, drop))
    on = re.search(r" \| on (\d+) process(?:es)?( with a GPU)?", line)
    if draft.problems or on is None:
        return list(draft.problems) or [f"~ {notice}" for notice in draft.run.notices]
    is_gpu = on[2] is not None
    machine = Machine("cuda" if is_gpu else "cpu", int(on[1]), supports_fp16=is_gpu, supports_bf16=not is_gpu)
    try:
        return [f"~ {notice}" for notice in resolve(draft.request(), machine, TokenizerFacts(1000, 999, "f")).notices]
    except ConfigError as failure:
        return list(failure.problems)


def golden_cases() -> dict[str, dict[str, list[str]]]:
    """The sentences of each command line of the file, by subject."""
    subjects: dict[str, dict[str, list[str]]] = {}
    said: list[str] = []
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            cases = subjects.setdefault(line[2:], {})
        elif line.startswith("    "):
            said.append(line.strip())
        else:
            said = cases[line] = []
    return subjects


def golden_text() -> str:
    """The file as it should be."""

    def lines() -> Iterator[str]:
        for subject, cases in golden_cases().items():
            yield f"# {subject}"
            for line in cases:
                yield line
                yield from (f"    {sentence}" for sentence in sentences(line))

    return "".join(f"{line}\n" for line in lines())
