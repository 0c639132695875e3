"""How much of a campaign the suite does; `--cases N` asks for N random cases, and for every case that has a name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

DEFAULT_CASES = 400


def sampled(cases: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """The cases as parameters of a test; those that are not kept run in the campaign only."""
    always = list(kept)
    unknown = [case for case in always if case not in (listed := list(cases))]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is kept and is none of {listed}")
    return [case if case in always else pytest.param(case, marks=pytest.mark.campaign) for case in cases]
