"""A pytest plugin that runs every nth of the named tests: `-p tests.helpers.suite.every_nth --every 20`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--every`."""
    parser.addoption("--every", type=int, default=1, help="run each nth test, beginning with the first")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the others."""
    chosen = items[:: config.getoption("--every")]
    taken = set(map(id, chosen))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in taken])
    items[:] = chosen
