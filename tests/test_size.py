"""How much there is to read: lines of both packages and of what training reaches, and names that mean one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Whoever needs more says why in the same commit; CONTRIBUTING names both numbers.
MAXIMUM_LINES = {"megatron": 71_620, "trident": 27_170}
MAXIMUM_REACHED_LINES = 63_750


@cache
def modules() -> dict[str, Path]:
    """Every module of the packages, by its dotted name."""
    paths = {path.relative_to(ROOT): path for root in MAXIMUM_LINES for path in (ROOT / root).rglob("*.py")}
    return {".".join(short.with_suffix("").parts).removesuffix(".__init__"): path for short, path in paths.items()}


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def imported(path: Path) -> set[str]:
    """The modules of both packages that a file imports anywhere, with the packages they are in."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    parts = [name.split(".") for name in names]
    return {".".join(words[:end]) for words in parts for end in range(1, len(words) + 1)} & modules().keys()


def reached(program: str) -> set[str]:
    """The modules that a program imports, directly or not, inside functions too."""
    seen: set[str] = set()
    waiting = imported(ROOT / program)
    while waiting:
        seen |= waiting
        waiting = set().union(*(imported(modules()[name]) for name in waiting)) - seen
    return seen


@pytest.mark.parametrize("root", MAXIMUM_LINES)
def test_a_package_stays_within_its_lines(root: str) -> None:
    assert sum(lines(path) for name, path in modules().items() if name.startswith(root)) <= MAXIMUM_LINES[root]


def test_training_reaches_only_so_much() -> None:
    names = reached("pretrain_gpt.py")
    assert {"megatron.train.loop", "megatron.engine.engine"} <= names and "megatron.inference" not in names
    assert sum(lines(modules()[name]) for name in names if name.startswith("megatron")) <= MAXIMUM_REACHED_LINES


def test_no_public_class_has_the_name_of_another() -> None:
    owners: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].append(module)
    assert {name: where for name, where in owners.items() if len(where) > 1} == {}


def test_contributing_names_the_limits() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"{limit:,}" in text for limit in (*MAXIMUM_LINES.values(), MAXIMUM_REACHED_LINES))
