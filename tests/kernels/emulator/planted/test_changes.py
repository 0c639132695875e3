"""Defects in the sources of csrc/ops make the emulator tests of their operation fail, for the right reason."""

from __future__ import annotations

import random

import pytest

from csrc.emulator.harness.builds import changed_operations
from csrc.emulator.planted.changes import CHANGES, undetected


def test_the_tests_find_planted_defects(pytestconfig: pytest.Config) -> None:
    """One of them; more with `--cases`, a thousand a defect, and others with `--fuzz-seed`."""
    count = min(len(CHANGES), max(1, pytestconfig.getoption("--cases") // 1000))
    chosen = random.Random(pytestconfig.getoption("--fuzz-seed")).sample(CHANGES, count)
    assert undetected(chosen) == []


def test_every_planted_text_is_in_its_source() -> None:
    """A source that changes takes its table along."""
    for change in CHANGES:
        assert changed_operations(change.source, change.text, change.replacement).is_dir()
