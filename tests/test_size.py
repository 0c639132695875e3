"""How much there is to read: lines of each package and of what training imports, and names that mean one thing."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tests.helpers.architecture import budget


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
