"""docs/layouts.md: each row is refused with its message, and every other combination is accepted."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

from docs.site.layout_survey import AXES, problems_of, survey, words_of
from docs.site.layouts import (
    COMMAND,
    FEW,
    PAGE,
    PAIRS_TESTED_BY,
    REPLICAS,
    TESTED_BY,
    grid,
    page,
    pair_tests,
    refused_on,
)
from tests.engine.pipeline import test_deepspeed_pipeline
from tests.parity import test_parity
from tests.parity.layouts import layout_flags
from tests.parity.pipeline import test_layout_table, test_schedules

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


def given_in(words: list[str]) -> set[tuple[str, str]]:
    """The pairs of a command's pipeline and its other values."""
    found = survey(words)
    return {(found.pipeline, one.value) for one in found.alternatives if one.is_given and one.axis != "pipeline"}


def trained_by() -> dict[str, set[tuple[str, str]]]:
    """The pairs that each test declares to train."""
    whole, schedules, deepspeed, few, each = PAIRS_TESTED_BY
    recomputed = dict(zip(test_schedules.RECOMPUTED, AXES["recompute"], strict=True))
    columns = set(AXES["ZeRO"]) | set(AXES["recompute"]) | set(AXES["tensor parallelism"])
    cases = [(tp, dp, case) for (tp, _, dp), some in test_schedules.KEPT.items() for case in some]
    plain = given_in(layout_flags(test_parity.RECIPE, (1, 1, 1), 1, test_schedules.DROPOUT))
    return {
        whole: plain | {("no pipeline", REPLICAS) for *_, dp in test_parity.KEPT if dp == 2},
        schedules: {
            *((case.schedule, value) for *_, case in cases for _, value in plain if value not in columns),
            *((case.schedule, f"ZeRO {case.zero_stage}") for *_, case in cases),
            *((case.schedule, recomputed[case.recomputed]) for *_, case in cases),
            *((case.schedule, f"tensor {tp}") for tp, _, case in cases),
            *((case.schedule, REPLICAS) for _, dp, case in cases if dp == 2),
        },
        deepspeed: {
            *given_in(layout_flags(test_deepspeed_pipeline.RECIPE, (1, 2, 1), 1, test_deepspeed_pipeline.OTHER)),
            *(("1f1b, engine deepspeed", REPLICAS) for *_, dp in test_deepspeed_pipeline.LAYOUTS if dp == 2),
        },
        few: set(FEW),
        **{
            each.replace("VALUE", value): {(pipeline, value) for pipeline in pipelines}
            for value, pipelines in test_layout_table.PAIRS.items()
        },
    }


def test_the_test_of_each_cell_trains_its_pair() -> None:
    refused = [frozenset(values) for values in REFUSED]
    cells, trained = pair_tests(refused), trained_by()
    assert set(cells.values()) == set(trained)
    for pair, test in cells.items():
        assert pair in trained[test], (pair, test)
    assert sum(line.count("| yes ") for line in grid(refused)) == len(cells)


def test_every_value_names_a_test_that_exists() -> None:
    assert set(TESTED_BY) == {value for axis in AXES.values() for value in axis}
    for test in (*TESTED_BY.values(), *(test.partition("[")[0] for test in PAIRS_TESTED_BY)):
        path, _, name = test.partition("::")
        defined = [node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
        assert name in defined, test
