"""The core, what it leaves out, and the tests that a change affects."""

from __future__ import annotations

import pytest

from tests.helpers.campaign_cases import mark_campaign
from tests.helpers.suite import dependencies, selection
from tests.helpers.suite.dependencies import affected

FILES = {
    "tests/tokenizers/test_gpt2.py",
    "tests/parity/test_parity.py",
    "tests/trident/plan/test_search.py",
    "tests/tools/test_serve.py",
    "tests/test_contributing.py",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("megatron/tokenizers/gpt2.py", "tests/tokenizers/test_gpt2.py"),
        ("megatron/engine/engine.py", "tests/parity/test_parity.py"),
        ("trident/plan/search.py", "tests/trident/plan/test_search.py"),
        ("tools/serve.py", "tests/tools/test_serve.py"),  # started as a program, not imported
        ("CONTRIBUTING.md", "tests/test_contributing.py"),
    ],
)
def test_a_change_selects_the_tests_that_depend_on_it(changed: str, expected: str) -> None:
    assert expected in affected(FILES, {changed})


def test_other_tests_are_not_selected() -> None:
    assert "tests/tokenizers/test_gpt2.py" not in affected(FILES, {"megatron/engine/engine.py"})
    assert "tests/parity/test_parity.py" not in affected(FILES, {"trident/plan/search.py"})
    assert affected(FILES, {"nothing/of/this/name.py"}) == set()


@pytest.mark.parametrize("path", sorted(dependencies.EVERYTHING))
def test_a_change_of_the_suite_itself_selects_everything(path: str) -> None:
    assert affected(FILES, {path}) == FILES


@pytest.mark.parametrize("case", mark_campaign(range(6), [0, 1, 4]))
@pytest.mark.sampled(2)
def test_cases_of_a_campaign_do_not_count(request: pytest.FixtureRequest, case: int) -> None:
    assert _core_cases(request, 6) == [0, 4]


@pytest.mark.full
def test_the_core_leaves_this_out(request: pytest.FixtureRequest) -> None:
    assert selection.core_of([request.node]) == set()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", range(5))
def test_the_core_has_every_third_case(request: pytest.FixtureRequest, case: int) -> None:
    assert _core_cases(request, 5) == [0, 3]


def _core_cases(request: pytest.FixtureRequest, count: int) -> list[int]:
    """The cases of the requesting test in the core."""
    cases = [item for item in request.session.items if item.function.__name__ == request.function.__name__]
    if len(cases) < count:
        pytest.skip("not all of the cases are here")
    core = selection.core_of(cases)
    return [item.callspec.params["case"] for item in cases if id(item) in core]
