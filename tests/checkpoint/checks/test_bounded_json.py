"""JSON whose cost is known before it is parsed."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import pytest

from megatron.checkpoint.checks import bounded_json
from megatron.checkpoint.checks.bounded_json import LARGEST_BYTES, check_extent, parse_bounded

MOST_RECORD_VALUES = 2**20


def test_what_json_writes_is_read() -> None:
    value = {"a": [1, -2.5, 1e-300, True, None, '"{[\\', "é\n\x1b", "0" * 64, {}, []], "b": {"c": [[2**62]]}}
    assert parse_bounded(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'"\xc3\xa9"', "has bytes that are not ASCII"),
        (b'{"a": 1, "a": 2}', "a name appears twice in one object"),
        (b"[NaN]", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"[1e999]", "the number 1e999 is too large"),
        (b"[" + b"9" * 5000 + b"]", "99999999999999999999... is not a whole number in range"),
        (b"[" * 65 + b"]" * 65, "nested 65 levels deep or deeper; 64 are allowed"),
        (b"[" * 900_000, r"nested \d+ levels deep"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, r"nested \d+ levels deep"),
        (b"[1,", "Expecting value"),
        (b'"open', "Unterminated string"),
        (b"", "Expecting value"),
    ],
)
def test_what_this_program_never_writes_is_refused(text: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_bounded(text)


@pytest.mark.parametrize(
    "piece",
    [
        b"[]",
        b"{}",
        b'{"a":1}',
        b"1",
        b"1.5",
        b'"ab"',
        b'"' + b"0" * 64 + b'"',
        b'"\\ud83d\\ude00' + b"a" * 60000 + b'"',
    ],
    ids=["lists", "objects", "entries", "numbers", "fractions", "texts", "digests", "letters"],
)
def test_the_estimate_covers_what_the_objects_take(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is accepted takes no more than the bound says, and what is refused is refused before it is parsed."""
    monkeypatch.setattr(bounded_json, "LARGEST_BYTES", 2**24)
    count, taken = 1, 0
    while True:
        text = b"[" + b",".join([piece] * count) + b"]"
        tracemalloc.start()
        try:
            assert len(parse_bounded(text)) == count
        except ValueError as failure:
            refused = str(failure)
            break
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        taken, count = peak, count + count // 4 + 1
    assert "would take about" in refused and "more than the 16777216 that are allowed" in refused
    assert 2**24 / 5 < taken < 1.1 * 2**24
    assert peak < 3 * len(text) + 2**22


def test_a_caller_may_know_a_reason_for_more() -> None:
    text = b"[" + b",".join([b"[]"] * 2_000_000) + b"]"
    with pytest.raises(ValueError, match="would take about"):
        parse_bounded(text)
    assert len(parse_bounded(text, lambda: LARGEST_BYTES)) == 2_000_000


def test_texts_do_not_count_as_structure() -> None:
    names = ["[" * 70, "{[,", '"', "\\", "1" * 30, "\\\\" + '"[']
    assert parse_bounded(json.dumps(names).encode()) == names


def test_the_extent_of_a_record_is_bounded() -> None:
    check_extent({"a": [1] * 1000, "b": {"c": "x" * 1000}})
    wide: Any = [0] * MOST_RECORD_VALUES
    for value in (wide, {"a": {str(number): 0 for number in range(MOST_RECORD_VALUES // 2 + 1)}}, "x" * (2**24 + 1)):
        with pytest.raises(ValueError, match=r"more than \d+ values or \d+ letters, which no run needs"):
            check_extent(value)


def test_any_bytes_are_parsed_or_refused() -> None:
    draw = random.Random(0)
    text = json.dumps({"a": [1, 2.5, "x\\", {"b": None}], "c": "é"}).encode()
    for _ in range(3000):
        changed = bytearray(text)
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(len(changed))] = draw.choice(b'[]{},:"\\019eE.-nu \x00\xff')
        try:
            value = parse_bounded(changed)
        except ValueError:
            continue
        assert value == json.loads(changed)
