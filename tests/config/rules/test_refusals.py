"""Each listed command line has the outcome that is listed, and every rule is broken by one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron.config.rules.checking import RULES
from megatron.config.rules.rule import Rule
from tests.config.refusals import REFUSALS, VALUES, golden_text


def test_refused_command_lines_and_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: set[Rule] = set()

    def recording(rule: Rule, *facts: object) -> Iterator[str]:
        for sentence in rule.sentences(*facts):
            broken.add(rule)
            yield sentence

    monkeypatch.setattr(Rule, "__call__", recording)
    assert golden_text(REFUSALS).splitlines() == REFUSALS.read_text(encoding="utf-8").splitlines()
    assert [rule.sentences.__qualname__ for rule in RULES if rule not in broken] == []


def test_values_of_command_lines() -> None:
    assert golden_text(VALUES).splitlines() == VALUES.read_text(encoding="utf-8").splitlines()
