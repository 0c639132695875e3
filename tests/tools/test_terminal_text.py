"""Text of corpora and models cannot steer the terminal that a tool writes to."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron import log
from megatron.parallel.mesh import ParallelMesh
from tools import chat, generate_samples_gpt, sample_idxs_to_text

LADEN = "a\x1b]0;owned\x07b\x1b[2J\x9b31mc\r\u202etxt\u2066d\x08\x7f\té\n漢"
SHOWN = r"a\u001b]0;owned\u0007b\u001b[2J\u009b31mc\u000d\u202etxt\u2066d\u0008\u007f" + "\té\r\n漢"  # the pty's \r
ASKED: list[str | None] = ["p", None]


def samples() -> None:
    sample_idxs_to_text._write(iter([LADEN]), None)


def generated() -> None:
    generator = SimpleNamespace(
        loaded=SimpleNamespace(mesh=ParallelMesh.single()),
        check_prompt=lambda prompt, name: None,
        records=lambda prompts, first: iter([{"text": LADEN}]),
    )
    generate_samples_gpt._interact(cast(Any, generator))


def answered() -> None:
    """In pieces, each of which is harmless alone."""
    conversation = SimpleNamespace(answer=lambda question, stops: iter(LADEN), dropped=0, was_cut=False)
    chat._answer(cast(Any, conversation), "question")


def result() -> None:
    log.line(LADEN)


OUTPUTS = [samples, generated, answered, result]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Makes standard output a terminal; gives what arrived there."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)

        def arrived() -> str:
            data = b""
            while LADEN[-1].encode() not in data:
                data += os.read(master, 1 << 16)
            return data.decode()

        yield arrived
    os.close(master)


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_terminal_sees_no_control_characters(output: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_samples_gpt, "_read_prompt", lambda number: ASKED[number - 1])
    with terminal(monkeypatch) as arrived:
        output()
        assert SHOWN in arrived()


@pytest.mark.parametrize("output", [samples, generated, answered])
def test_a_file_gets_the_text_as_it_is(
    output: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(generate_samples_gpt, "_read_prompt", lambda number: ASKED[number - 1])
    with (tmp_path / "out").open("w", encoding="utf-8", newline="") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        output()
    assert LADEN in (tmp_path / "out").read_bytes().decode()
