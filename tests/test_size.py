"""How much there is to read, and how well: lines of each package, distinct class names, rare stumbling words."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tests.helpers.architecture import budget, wording


@pytest.mark.parametrize("name", budget.budgets())
def test_a_package_stays_within_its_budget(name: str) -> None:
    size, limit = budget.sizes().get(name, 0), budget.budgets()[name]
    assert size <= limit, f"{size} lines; budget.toml allows {limit}: delete something, or raise it with the reason"
    assert budget.lowered(limit, size) == limit, f"only {size} lines: run python -m {budget.__name__}"


def test_every_package_has_a_budget() -> None:
    assert budget.budgets().keys() == budget.sizes().keys()


def test_training_imports_no_generation() -> None:
    names = budget.reached(budget.TRAINING)
    assert {"megatron.train.loop", "megatron.engine.engine"} <= names and "megatron.inference" not in names


def test_a_budget_falls_with_its_package_and_never_rises() -> None:
    assert [budget.lowered(400, size) for size in (391, 390, 12, 0, 500)] == [400, 390, 20, 0, 400]


def test_no_public_class_has_the_name_of_another_in_its_package() -> None:
    owners: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module, path in budget.modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[budget.package_of(module), node.name].append(module)
    assert {name: where for name, where in owners.items() if len(where) > 1} == {}


@pytest.fixture(scope="module")
def hits() -> dict[str, list[tuple[str, int, str]]]:
    return wording.hits()


@pytest.mark.parametrize("pattern", wording.PATTERNS)
def test_no_pattern_is_above_its_ceiling(pattern: str, hits: dict[str, list[tuple[str, int, str]]]) -> None:
    ceiling = wording.ceilings()[pattern]
    command = f"python -m {wording.__name__} '{pattern}'"
    assert len(hits[pattern]) <= ceiling, (
        f"{len(hits[pattern])} hits, {ceiling} allowed; see `{command}` and `git diff`"
    )


def test_patterns_are_found_where_they_are() -> None:
    text = '"""What it is."""\ndef f(place):\n    """True if a rank says so."""\n    # those of others\n    own = 1\n'
    found = sorted(wording.of_file("x.py", text))
    assert found == [
        ("docstring: What/Whether/How/Which", 1),
        ("is said/says", 3),
        ("name: own", 2),
        ("name: place", 2),
        ("those of/that of", 4),
    ]
