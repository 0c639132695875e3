"""Every acceptance scenario has a test of its own, named after its number."""

from __future__ import annotations

import re
from pathlib import Path

SCENARIOS = {"000": 7, "001": 9, "002": 8, "003": 5, "004": 5}


def test_every_scenario_has_one_test_that_bears_its_number() -> None:
    found = {
        path.stem: re.findall(r"^def (test_\d{3}_\d)_\w+\(", path.read_text(), re.MULTILINE)
        for path in Path(__file__).parent.glob("*/test_[0-9]*.py")
    }
    names = [f"test_{system}_{number}" for system, count in SCENARIOS.items() for number in range(1, count + 1)]
    assert found == {name: [name] for name in names}
    assert len(names) == 34
