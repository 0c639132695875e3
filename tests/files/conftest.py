"""No test of this folder waits for a file."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """Ends a read that waits: a naive one of a named pipe does so for ever."""

    def late(*_: object) -> None:
        raise TimeoutError("the file was waited for")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(90)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
