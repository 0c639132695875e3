"""Wording that readers stumble over becomes rarer, never more frequent."""

from __future__ import annotations

import pytest

from tests.helpers.architecture import wording


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
