"""Lines of JSON that are refused, each with the byte where it goes wrong and the reason given."""

from __future__ import annotations

GOOD = b'{"text": "good"}'

BAD = [
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
