"""Selection of tests: the core with samples (`--core`), what the core leaves out (`--rest`), what a change affects.

A test marked `full` runs without `--core` only. Of a test marked `sampled(n)`, the core runs each nth case, beginning
with the first; cases marked `campaign` do not count. Tests with the fixture `compiled` are not in the core either:
compiling csrc takes most of a minute. Plain `pytest PATH` runs everything it is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.suite.dependencies import ROOT, affected, changed_since

_COMPILED = "compiled"  # the fixture with the library of csrc


def add_options(parser: pytest.Parser) -> None:
    """Adds `--core`, `--rest` and `--changed`."""
    group = parser.getgroup("selection")
    group.addoption("--core", action="store_true", help="leave out tests marked full, and most cases of sampled ones")
    group.addoption("--rest", action="store_true", help="run only what --core leaves out")
    group.addoption("--changed", metavar="REF", help="run only tests that depend on a file changed since REF")


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects, in place, what the options leave out."""
    kept = items
    if config.getoption("--core") or config.getoption("--rest"):
        core = core_of(items)
        kept = [item for item in kept if (id(item) in core) == bool(config.getoption("--core"))]
    if reference := config.getoption("--changed"):
        files = {_file(item) for item in kept}
        chosen = affected(files, changed_since(reference))
        kept = [item for item in kept if _file(item) in chosen]
    if len(kept) < len(items):
        remaining = set(map(id, kept))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in remaining])
        items[:] = kept


def core_of(items: list[pytest.Item]) -> set[int]:
    """The `id` of each item that belongs to the core."""
    core: set[int] = set()
    cases: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("full") or item.get_closest_marker("campaign") or _COMPILED in _fixtures(item):
            continue
        if marker := item.get_closest_marker("sampled"):
            function = item.nodeid.partition("[")[0]
            cases[function] += 1
            if (cases[function] - 1) % marker.args[0]:
                continue
        core.add(id(item))
    return core


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


def _file(item: pytest.Item) -> str:
    return Path(item.path).relative_to(ROOT).as_posix()
