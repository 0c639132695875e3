"""Lines of JSON: every kind of bad line is named with the byte where it goes wrong."""

from __future__ import annotations

import json

import pytest

from megatron.corpus.inputs import lines as lines_module
from megatron.corpus.inputs.lines import parse_lines

GOOD = b'{"text": "good"}'

BAD = [
    (b"", 0, "the line is empty"),
    (b"   ", 0, "the line is empty"),
    (b"{", 1, "not JSON"),
    (b'{"text": "a" "b"}', 13, "not JSON: Expecting ',' delimiter"),
    ('{"é": 1, x}'.encode(), 10, "not JSON"),
    (b'{"text": "\xff\xfe"}', 10, "not UTF-8: byte 0xff"),
    (b'{"other": "a"}', 0, "key 'text' (--json-keys) is missing; the line has 'other'"),
    (b"{}", 0, "the line has no keys"),
    (b'{"text": null}', 0, "key 'text' holds a JSON null, not a string"),
    (b'{"text": 5}', 0, "holds a JSON number"),
    (b'{"text": true}', 0, "holds a JSON boolean"),
    (b'{"text": ["a"]}', 0, "holds a JSON array"),
    (b'{"text": {"a": 1}}', 0, "holds a JSON object"),
    (b'["text"]', 0, "the line holds a JSON array, not an object"),
    (b'"text"', 0, "the line holds a JSON string, not an object"),
    (b"7", 0, "the line holds a JSON number, not an object"),
    (b'{"text": "a\\ud800b"}', 0, "lone surrogate U+D800"),
    (b'{"text": "a\\udfffb"}', 0, "lone surrogate U+DFFF"),
    (b'{"text": ' + b"[" * 100_000 + b"}", 0, "nested too deeply"),
    (b'{"text": "a"}{"text": "b"}', 13, "not JSON: Extra data"),
    (b'{"text": "a\x00b"}', 11, "not JSON: Invalid control character"),
]


@pytest.fixture(params=["orjson", "standard library"])
def _parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "orjson":
        pytest.importorskip("orjson")
    else:
        monkeypatch.setattr(lines_module, "_LOADS", lines_module._standard_loads)


@pytest.mark.usefixtures("_parser")
@pytest.mark.parametrize(("line", "offset", "reason"), BAD)
@pytest.mark.parametrize("keys", [("text",), ("text", "text2")])
def test_bad_lines_are_located(line: bytes, offset: int, reason: str, keys: tuple[str, ...]) -> None:
    good = GOOD if len(keys) == 1 else b'{"text": "good", "text2": "b"}'
    data = good + b"\n" + line + b"\n" + good + b"\n"
    stopped = parse_lines(data, keys, is_first=True, skip_bad=False)
    assert [bad.line for bad in stopped.bad] == [1]
    assert stopped.bad[0].offset == len(good) + 1 + offset
    assert reason in stopped.bad[0].reason
    skipped = parse_lines(data, keys, is_first=True, skip_bad=True)
    assert (skipped.texts[0], skipped.bad_count, skipped.lines) == (["good", "good"], 1, 3)


@pytest.mark.usefixtures("_parser")
def test_all_valid_json_is_accepted() -> None:
    texts = [
        "",
        "a",
        "\r\n\t",
        "é😀\u0000",
        '"\\/',
        "x" * 100_000,
        "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    ]
    data = b"".join(json.dumps({"n": 10**30, "text": text, "deep": [[[]]]}).encode() + b"\r\n" for text in texts)
    assert parse_lines(data, ["text"], is_first=True, skip_bad=False).texts == [texts]
    odd = b'{"text": "first", "text": "last"}\n{"x": NaN, "text": "n"}\n{"text": "no newline"}'
    assert parse_lines(odd, ["text"], is_first=True, skip_bad=False).texts == [["last", "n", "no newline"]]


def test_a_byte_order_mark_is_skipped_at_the_start_only() -> None:
    data = b"\xef\xbb\xbf" + GOOD + b"\n" + b"\xef\xbb\xbf" + GOOD + b"\n"
    parsed = parse_lines(data, ["text"], is_first=True, skip_bad=False)
    assert parsed.texts == [["good"]] and parsed.bad[0].line == 1
    assert parsed.bad[0].offset == 3 + len(GOOD) + 1
    assert parse_lines(data, ["text"], is_first=False, skip_bad=False).bad[0].line == 0


def test_several_keys_stay_in_step_and_only_a_few_bad_lines_are_kept() -> None:
    data = b'{"a": "1", "b": "2"}\n{"a": "3"}\n{"a": "4", "b": "5"}\n'
    parsed = parse_lines(data, ["a", "b"], is_first=True, skip_bad=True)
    assert parsed.texts == [["1", "4"], ["2", "5"]] and parsed.bad_count == 1
    many = parse_lines(b"x\n" * 1000, ["a"], is_first=True, skip_bad=True)
    assert many.bad_count == 1000 and 1 <= len(many.bad) <= 10


def test_no_lines() -> None:
    assert parse_lines(b"", ["text"], is_first=True, skip_bad=False).texts == [[]]


# --- long lines -------------------------------------------------------------------------------------
