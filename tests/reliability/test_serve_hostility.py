"""A sample of hostile requests: the server refuses them, goes on, and is left as it was."""

from __future__ import annotations

import pytest

from tests.reliability.serve_hostility import make_case, run


@pytest.mark.slow
def test_hostile_requests(pytestconfig: pytest.Config) -> None:
    """A twentieth of `--cases`, others with `--fuzz-seed`; `--case` of the campaign sends one again."""
    cases, seed = max(100, pytestconfig.getoption("--cases") // 20), pytestconfig.getoption("--fuzz-seed")
    findings = run(cases, seed)
    assert findings.failures == []
    assert sum(findings.statuses.values()) == cases
    refused = sum(count for (_, status), count in findings.statuses.items() if status.startswith("4"))
    answered = sum(count for (_, status), count in findings.statuses.items() if status == "200")
    assert refused > cases // 3 and answered > 0


def test_a_case_is_always_the_same() -> None:
    assert [make_case(3, number) for number in range(50)] == [make_case(3, number) for number in range(50)]
    assert {make_case(3, number).kind for number in range(50)} == {
        "wrong values", "bodies", "damaged", "heads", "noise", "leavers",
    }  # fmt: skip
