"""Cases that run only with more than the default of `--cases`: those marked `campaign`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

DEFAULT_CASES = 400


def mark_campaign(cases: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """Returns the cases as parameters of a test; all but the kept ones are marked `campaign`."""
    always = list(kept)
    unknown = [case for case in always if case not in (listed := list(cases))]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is kept and is none of {listed}")
    return [case if case in always else pytest.param(case, marks=pytest.mark.campaign) for case in cases]
