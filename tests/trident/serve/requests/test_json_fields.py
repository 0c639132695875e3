"""Bodies become typed values, or a refusal that names what is wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from trident.serve.requests.json_fields import JsonFields, checked_text, kind_of, read_object
from trident.serve.requests.refusals import Refusal


def test_an_object_is_read() -> None:
    body = '{"a": [1, {"b": "[[[[[[\\"{"}], "ş": null}'.encode()
    assert read_object(body, max_depth=3) == json.loads(body)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON: Expecting value"),
        (b"{", "not JSON"),
        (b"[1]", "must be a JSON object, not a list"),
        (b"null", "must be a JSON object, not null"),
        (b'"\xff"', "not UTF-8: byte 1 is 0xff"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8: byte 7 is 0xed"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' occurs twice"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": -Infinity}', "-Infinity is not a number"),
        (b'{"a": [[[[1]]]]}', "deeper than 4 levels"),
        (b"[" * 500_000, "deeper than 4 levels"),
        (b'{"a":' * 200_000, "deeper than 4 levels"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
        (b'{"a": 1} x', "not JSON: Extra data"),
        (b'{"a": "\n"}', "not JSON: Invalid control character"),
    ],
)
def test_other_bodies_are_refused(body: bytes, says: str) -> None:
    with pytest.raises(Refusal, match=says) as caught:
        read_object(body, max_depth=4)
    assert caught.value.status == 400


def test_hostile_bodies_take_linear_time() -> None:
    """A megabyte of each takes processor time in the order of a second at most; quadratic time would be an hour."""
    bodies = [
        b'{"a": "' + b'\\"' * 500_000,
        b'{"' + b'"{' * 500_000,
        b"{" + b'"k":1,' * 170_000,
        b'{"a":' + b"9" * 10**6,
    ]
    started_at = time.process_time()
    for body in bodies:
        with pytest.raises(Refusal):
            JsonFields(read_object(body + b"}", max_depth=4)).integer("a", None, 0, 9)
    assert time.process_time() - started_at < 60


@pytest.mark.parametrize(
    ("read", "value", "says"),
    [
        (lambda fields: fields.text("x"), 3, "'x' must be a text, not the number 3"),
        (lambda fields: fields.text("x"), "\ud800", "'x' holds half of a surrogate pair"),
        (lambda fields: fields.flag("x"), "true", "'x' must be true or false, not the text 'true'"),
        (lambda fields: fields.flag("x"), 1, "'x' must be true or false, not the number 1"),
        (lambda fields: fields.integer("x", 1, 0, 9), True, "'x' must be an integer, not true"),
        (lambda fields: fields.integer("x", 1, 0, 9), 2.5, "'x' must be an integer, not the number 2.5"),
        (lambda fields: fields.integer("x", 1, 0, 9), 10, "'x' is 10, but must be from 0 to 9"),
        (lambda fields: fields.integer("x", 1, 0, 9), [], "'x' must be an integer, not a list"),
        (lambda fields: fields.number("x", 1, 0, 2), 2.5, "'x' is 2.5, but must be from 0 to 2"),
        (lambda fields: fields.number("x", 1, 0, 2), False, "'x' must be a number, not false"),
        (lambda fields: fields.list_of("x", lambda one, _: one, 2), {}, "'x' must be a list, not an object"),
        (lambda fields: fields.list_of("x", lambda one, _: one, 2), [1, 2, 3], "'x' has 3 entries, but .* at most 2"),
        (lambda fields: fields.list_of("x", checked_text, 2), ["a", 1], r"'x\[1\]' must be a text"),
        (
            lambda fields: fields.unsupported("x", "no tools", harmless=(False,)),
            0,
            "'x' is not supported here: no tools",
        ),
    ],
)
def test_a_wrong_value_is_named(read: Callable[[JsonFields], Any], value: Any, says: str) -> None:
    with pytest.raises(Refusal, match=says) as caught:
        read(JsonFields({"x": value}))
    assert caught.value.status == 400 and caught.value.parameter in ("x", "x[1]")


def test_huge_numbers_are_out_of_bounds() -> None:
    for number in (b"9" * 400, b"-" + b"9" * 400, b"1e999"):
        with pytest.raises(Refusal, match="'x' is a number too large to be used; it must be from 0 to 9"):
            JsonFields(read_object(b'{"x": ' + number + b"}", 4)).integer("x", 1, 0, 9)


def test_right_values_are_returned() -> None:
    fields = JsonFields(
        {"text": "ş", "on": True, "count": 3.0, "share": 1, "list": ["a"], "nothing": None, "off": False}
    )
    assert (fields.text("text"), fields.flag("on"), fields.integer("count", 0, 0, 9)) == ("ş", True, 3)
    assert fields.number("share", 0.5, 0, 1) == 1.0 and fields.list_of("list", checked_text, 1) == ["a"]
    assert fields.text("nothing", "x") == "x" and fields.integer("absent", 4, 0, 9) == 4
    fields.unsupported("off", "it is off", harmless=(False,))
    fields.finish()


def test_unread_fields_are_refused_with_the_known_ones() -> None:
    fields = JsonFields({"known": 1, "temprature": 2}, "place.")
    fields.value("known")
    with pytest.raises(
        Refusal, match=r"'place\.temprature' is not a field of this request\. Known fields: known\."
    ) as caught:
        fields.finish()
    assert caught.value.to_json()["error"] == {
        "message": caught.value.message,
        "type": "invalid_request_error",
        "param": "place.temprature",
        "code": "unknown_parameter",
    }


def test_values_are_called_what_json_calls_them() -> None:
    kinds = [kind_of(value) for value in (None, {}, [], True, 2, "a" * 100)]
    assert kinds[:5] == ["null", "an object", "a list", "true", "the number 2"] and len(kinds[5]) < 80
