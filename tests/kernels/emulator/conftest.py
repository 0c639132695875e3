"""Tests of the emulated kernels run with --all, and with --changed if a source of `csrc` changed.

Tests of one file stay in one process: they share compiled kernels, and the last of them checks the coverage.
"""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("full")


@pytest.fixture(scope="module", autouse=True)
def one_process_a_file() -> None:
    """A fixture of module scope keeps the tests of a file on one worker."""


@pytest.fixture
def whole_file(pytestconfig: pytest.Config) -> None:
    """Skips a test of what the other tests of its file executed, if only some of them were selected."""
    if pytestconfig.option.keyword or any("::" in argument for argument in pytestconfig.args):
        pytest.skip("needs all tests of its file, and only some were selected")
