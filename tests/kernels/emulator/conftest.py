"""Tests of the emulated kernels run with --all, and with --changed if a source of `csrc` changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from csrc.emulator import emulator
from megatron.kernels.native.library import SOURCES


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("full")


@pytest.fixture(scope="module", autouse=True)
def every_line_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks that the tests of a file ran every line of its operation, unless only some of them were selected.

    Its scope keeps the tests of a file, which share compiled kernels, on one worker.
    """
    yield
    operation, config = request.module.__name__.rpartition("test_")[2], request.config
    is_whole = not config.option.keyword and not any("::" in argument for argument in config.args)
    if is_whole and (SOURCES / operation).is_dir():
        assert emulator.unexecuted_lines(operation) == []
