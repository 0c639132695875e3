"""Every rule is broken by a command line of `golden/refusals.txt`, which is answered with the sentences there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.config.rules.checking import RULES
from megatron.config.rules.rule import Rule
from tests.config.refusals import golden_cases, golden_text, sentences


@pytest.mark.parametrize("subject", golden_cases())
def test_a_broken_rule_is_refused_with_its_sentence(subject: str) -> None:
    for line, expected in golden_cases()[subject].items():
        assert sentences(line) == expected, line


def test_every_rule_has_a_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken: set[Rule] = set()

    def recording(rule: Rule, *facts: object) -> Iterator[str]:
        for sentence in rule.sentences(*facts):
            broken.add(rule)
            yield sentence

    monkeypatch.setattr(Rule, "__call__", recording)
    golden_text()
    file = tmp_path / "ds.json"  # whose name is in its sentences, which are in test_deepspeed.py
    file.write_text('{"gradient_accumulation_steps": 3}', encoding="utf-8")
    sentences(f"--deepspeed_config {file} | on 1 process")
    assert [rule.sentences.__qualname__ for rule in RULES if rule not in broken] == []
