"""Lines of JSON: every kind of bad line is named with the byte where it goes wrong."""

from __future__ import annotations

import json

import pytest

from megatron.errors import DataError
from trident.corpus.inputs.lines import BadLine, BadLines, parse_lines

GOOD = b'{"text": "good"}'

BAD = [
    (b'{"text": "a" "b"}', 13, "not JSON: Expecting ',' delimiter"),
    ('{"é": 1, x}'.encode(), 10, "not JSON"),
    (b'{"text": "\xff\xfe"}', 10, "not UTF-8: byte 0xff"),
    (b'{"other": "a"}', 0, "key 'text' (--json-keys) is missing; the line has 'other'"),
    (b"{}", 0, "the line has no keys"),
    (b'{"text": null}', 0, "key 'text' holds a JSON null, not a string"),
    (b'{"text": 5}', 0, "holds a JSON number"),
    (b'["text"]', 0, "the line holds a JSON array, not an object"),
    (b'{"text": "a\\ud800b"}', 0, "lone surrogate U+D800"),
    (b'{"text": ' + b"[" * 100_000 + b"}", 0, "nested too deeply"),
    (b'{"text": "a"}{"text": "b"}', 13, "not JSON: Extra data"),
    (b'{"text": "a\x00b"}', 11, "not JSON: Invalid control character"),
]


@pytest.mark.usefixtures("json_parser")
@pytest.mark.parametrize("keys", [("text",), ("text", "text2")])
def test_bad_lines_are_located(keys: tuple[str, ...]) -> None:
    good = GOOD if len(keys) == 1 else b'{"text": "good", "text2": "b"}'
    for line, offset, reason in BAD:
        data = good + b"\n" + line + b"\n" + good + b"\n"
        stopped = parse_lines(data, keys, is_first=True, skip_bad=False)
        assert [bad.line for bad in stopped.bad] == [1]
        assert stopped.bad[0].offset == len(good) + 1 + offset
        assert reason in stopped.bad[0].reason
        skipped = parse_lines(data, keys, is_first=True, skip_bad=True)
        assert (skipped.texts[0], skipped.bad_count, skipped.lines) == (["good", "good"], 1, 3)


@pytest.mark.usefixtures("json_parser")
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


@pytest.mark.usefixtures("json_parser")
@pytest.mark.parametrize("keys", [("text",), ("text", "text")])
def test_blank_lines_are_no_documents_and_keep_their_numbers(keys: tuple[str, ...]) -> None:
    data = b"\n" + GOOD + b"\n \t\r\n\nno JSON\n\n" + GOOD + b"\n\n"
    parsed = parse_lines(data, keys, is_first=True, skip_bad=True)
    assert parsed.texts == [["good", "good"]] * len(keys) and parsed.bad_count == 1
    assert (parsed.lines, parsed.bad[0].line, parsed.bad[0].offset) == (8, 4, data.index(b"no JSON"))
    for blank in (b"\n", b" ", b"\xef\xbb\xbf\n"):
        parsed = parse_lines(blank, keys, is_first=True, skip_bad=False)
        assert (parsed.texts, parsed.bad, parsed.lines) == ([[]] * len(keys), [], 1)


def test_several_keys_stay_in_step_and_only_a_few_bad_lines_are_kept() -> None:
    data = b'{"a": "1", "b": "2"}\n{"a": "3"}\n{"a": "4", "b": "5"}\n'
    parsed = parse_lines(data, ["a", "b"], is_first=True, skip_bad=True)
    assert parsed.texts == [["1", "4"], ["2", "5"]] and parsed.bad_count == 1
    many = parse_lines(b"x\n" * 1000, ["a"], is_first=True, skip_bad=True)
    assert many.bad_count == 1000 and 1 <= len(many.bad) <= 10


@pytest.mark.parametrize(
    ("source", "reason", "ends"),
    [
        ("a.jsonl", "key 'text' (--json-keys) is missing", "--on-bad-line skip."),
        ("<stdin>", "not JSON: Expecting value", r"If this is plain text, set the document separator, such as --do"),
        ("a.log", "not JSON: Expecting value", "If this is plain text, rename the file to *.txt: then each line is"),
    ],
)
def test_the_advice_names_plain_text_where_a_line_is_not_json(source: str, reason: str, ends: str) -> None:
    with pytest.raises(DataError) as failure:
        BadLines(are_skipped=False, consequence="Nothing was read. ").take([BadLine(2, 7, reason)], 1, source, 100, 40)
    advice = str(failure.value).removeprefix(f"{source}:43: byte offset 107: {reason}. Nothing was read. ")
    assert advice.startswith("Fix the line, or skip such lines with --on-bad-line skip.")
    assert ends in advice
    assert ("plain text" in advice) is reason.startswith("not JSON")


def test_the_first_few_bad_lines_are_shown_and_all_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    skipped = BadLines(are_skipped=True)
    for block in range(3):
        skipped.take([BadLine(line, 0, "the line is empty") for line in range(3)], 10, "in.jsonl", 0, 100 * block)
    assert skipped.count == 30
    assert capsys.readouterr().err.count("; skipped") == 3
