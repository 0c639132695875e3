"""Lines of JSON that are many megabytes long."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.tokenizers.encoders.long_text import LongText
from tests.corpus.inputs.bad_lines import BAD, GOOD
from trident.corpus.inputs import lines as lines_module
from trident.corpus.inputs import long_lines
from trident.corpus.inputs.lines import parse_lines


@pytest.fixture
def _long_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes lines long at 40 bytes, strings at 12, and pieces 7 bytes long."""
    monkeypatch.setattr(lines_module, "LONG_LINE_BYTES", 40)
    monkeypatch.setattr(long_lines, "_LONG_STRING_BYTES", 12)
    monkeypatch.setattr(long_lines, "_PIECE_BYTES", 7)


def _as_texts(texts: list[str | LongText]) -> list[str]:
    return [text.whole() if isinstance(text, LongText) else text for text in texts]


@pytest.mark.usefixtures("_long_from_now_on", "json_parser")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    text=st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from('"\\/\n\té한😀')), max_size=200),
    as_ascii=st.booleans(),
)
def test_a_long_line_gives_the_same_text_as_json(text: str, as_ascii: bool) -> None:
    line = json.dumps({"id": 7, "text": text, "more": {"long": "a\\" * 20}}, ensure_ascii=as_ascii).encode()
    parsed = parse_lines(line + b"\n", ("text", "more.long"), is_first=False, skip_bad=False, hold_long=True)
    assert [_as_texts(texts) for texts in parsed.texts] == [[text], ["a\\" * 20]]


@pytest.mark.usefixtures("_long_from_now_on", "json_parser")
@pytest.mark.parametrize(("line", "offset", "reason"), BAD)
def test_what_is_wrong_with_a_long_line_is_located(line: bytes, offset: int, reason: str) -> None:
    filler = b'"filler": "' + b"x" * 50 + b'\\" \\\\", '
    if line[:1] == b"{" and line[1:2] == b'"':
        line, offset = b"{" + filler + line[1:], offset + len(filler) if offset else 0
    parsed = parse_lines(GOOD + b"\n" + line + b"\n", ("text",), is_first=True, skip_bad=True)
    assert parsed.bad_count == 1
    assert parsed.bad[0].offset == len(GOOD) + 1 + offset
    assert reason.partition("'other'")[0] in parsed.bad[0].reason


@pytest.mark.usefixtures("_long_from_now_on", "json_parser")
@pytest.mark.parametrize(
    ("text", "offset", "reason"),
    [
        (b"0123456789012345678901234567890\xff", 41, "not UTF-8: byte 0xff"),
        (b"01234567890123456789012345678\\q01", 39, "not JSON: Invalid \\escape"),
        (b"0123456789012345678901234567\x00", 38, "not JSON: Invalid control character"),
        (b"0123456789012345678901234567\\ud800 and on", 0, "lone surrogate U+D800"),
    ],
)
def test_what_is_wrong_inside_a_long_string_is_located(text: bytes, offset: int, reason: str) -> None:
    parsed = parse_lines(b'{"text": "' + text + b'"}', ("text",), is_first=False, skip_bad=True)
    assert (parsed.bad[0].offset, parsed.bad_count) == (offset, 1)
    assert reason in parsed.bad[0].reason


@pytest.mark.usefixtures("_long_from_now_on")
def test_a_long_line_without_a_long_string_is_rejected_before_it_fills_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines_module, "MOST_BYTES_BESIDE_LONG_STRINGS", 2 << 20)
    line = b'{"numbers": [' + b"1, " * 1_500_000 + b'1], "text": "a"}'
    parsed = parse_lines(line, ("text",), is_first=False, skip_bad=True)
    assert "the line has 4 MiB besides its long strings; at most 2 MiB" in parsed.bad[0].reason
