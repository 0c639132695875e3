"""docs/layouts.md: each row is refused with its message, and every other combination is accepted."""

import ast
import random
from pathlib import Path

import pytest

from docs.site.layout_survey import AXES, problems_of, words_of
from docs.site.layouts import (
    COMMAND,
    PAGE,
    PAIRS_TESTED_BY,
    TESTED_BY,
    page,
    refused_on,
)

ROOT = Path(__file__).resolve().parents[3]
REFUSED = refused_on(PAGE.read_text(encoding="utf-8"))
WRITE = "run python docs/site/layouts.py"


def test_the_page_is_what_its_rows_make() -> None:
    assert page(list(REFUSED.items())) == PAGE.read_text(encoding="utf-8"), WRITE


def test_what_is_refused_is_refused_with_its_sentence() -> None:
    assert len(REFUSED) > 3
    for values, sentence in REFUSED.items():
        assert " ".join(problems_of([*COMMAND, *words_of(values)])) == sentence, WRITE


def test_any_other_combination_works(request: pytest.FixtureRequest) -> None:
    chance = random.Random(7)
    for _ in range(request.config.getoption("--cases") // 8):
        values = [chance.choice(list(axis)) for axis in AXES.values()]
        is_refused = any(set(row) <= set(values) for row in REFUSED)
        assert bool(problems_of([*COMMAND, *words_of(values)])) == is_refused, (values, WRITE)


def test_every_value_names_a_test_that_exists() -> None:
    assert set(TESTED_BY) == {value for axis in AXES.values() for value in axis}
    for test in (*TESTED_BY.values(), *(test.partition("[")[0] for test in PAIRS_TESTED_BY)):
        path, _, name = test.partition("::")
        defined = [node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
        assert name in defined, test
