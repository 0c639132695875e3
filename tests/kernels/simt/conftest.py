"""Tests of one file stay in one process: they share compiled kernels, and the last of them looks at what has run."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_process_a_file() -> None:
    """A fixture of the file's own, by which several workers keep its tests together."""


@pytest.fixture
def whole_file(pytestconfig: pytest.Config) -> None:
    """Skips a test that judges what the other tests of its file did, where only some of them were asked for."""
    if pytestconfig.option.keyword or any("::" in argument for argument in pytestconfig.args):
        pytest.skip("judges all tests of its file, of which only some were selected")
