"""Checks the form of a run's name."""

from __future__ import annotations

import re
import time

from megatron.observe.naming.run_names import ADJECTIVES, SURNAMES, run_name

AT = time.strptime("2026-11-22 11:30", "%Y-%m-%d %H:%M")


def test_a_name_has_two_words_and_the_hour() -> None:
    assert run_name(lambda words: words[0], AT) == f"{ADJECTIVES[0]}_{SURNAMES[0]}-26112211"
    assert len(set(ADJECTIVES)) == len(ADJECTIVES) and len(set(SURNAMES)) == len(SURNAMES)
    assert all(re.fullmatch("[a-z]+", word) for word in (*ADJECTIVES, *SURNAMES))
