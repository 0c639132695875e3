"""Files of flags are bounded: no device, pipe, bomb or unusable text gets through, and nothing takes long."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.config import parse
from megatron.errors import ConfigError
from megatron.files.settings import MOST_YAML_BYTES, MOST_YAML_VALUES, read_json, read_text, read_yaml

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 8)}]\n" for number in range(1, 9)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{number}: &a{number}\n  <<: [{', '.join([f'*a{number - 1}'] * 8)}]\n" for number in range(1, 9)
)
YAML_BOMBS = {
    "aliases": (LAUGHS, r"expands to more than 20,000 values \(aliases"),
    "merges": (MERGES, r"expands to more than 20,000 values \(aliases"),
    "an alias in itself": ("a: &a [*a]\n", r"an alias \(\*name\) inside its own definition"),
    "depth": ("[" * 100_000, r"more than 32 levels deep"),
    "indentation": ("".join(" " * level + "a:\n" for level in range(300)), r"more than 32 levels deep"),
    "values": (f"[{'1,' * (MOST_YAML_VALUES + 1)}]", r"has more than 20,000 values"),
    "size": ("# " + "x" * MOST_YAML_BYTES, r"has 524,290 bytes; at most 524,288 are allowed"),
    "digits": ("lr: " + "9" * 5000, r"has a number of 5,000 digits: 9999"),
    "sexagesimal": ("lr: 1" + ":1" * 60_000, r"has a number of 120,001 digits: 1:1"),
    "a key twice": ("lr: 1\nlr: 2\n", r'has the key "lr" twice'),
    "a NUL": ('save: "a\\0b"\n', r'"a\\x00b" contains a NUL, which is not allowed'),
    "a lone surrogate": ('save: "a\\ud800b"\n', r"contains the unpaired surrogate U\+D800"),
    "an object": ("!!python/object/apply:os.system [ls]\n", r"is not YAML: could not determine a constructor"),
    "a date": ("save: 2020-99-99\n", r"is not YAML: month must be in 1\.\.12"),
}  # fmt: skip
JSON_BOMBS = {
    "depth": ("[" * 100_000, r"more than 32 levels deep"),
    "a little depth": ("[" * 40 + "]" * 40, r"more than 32 levels deep"),
    "values": ("[" + "[]," * 600_000 + "[]]", r"has about 1,200,002 values; at most 100,000 are allowed"),
    "size": (" " * ((4 << 20) + 1), r"has 4,194,305 bytes; at most 4,194,304 are allowed"),
    "digits": ('{"lr": ' + "9" * 5000 + "}", r"is not JSON: Exceeds the limit"),
    "a key twice": ('{"lr": 1, "lr": 2}', r'has the key "lr" twice'),
    "a NUL": ('{"save": "a\\u0000b"}', r'"a\\x00b" contains a NUL, which is not allowed'),
    "a lone surrogate": ('{"a": ["\\udfff"]}', r"contains the unpaired surrogate U\+DFFF"),
    "a surrogate in a key": ('{"\\udfff": 1}', r"contains the unpaired surrogate U\+DFFF"),
    "a raw NUL": ('{"a": "\0"}', r"contains a NUL character at position 7"),
}  # fmt: skip


def refuse(read: Callable[[], Any], sentence: str) -> None:
    """Checks that a file is refused with a sentence, soon, and without much memory."""
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(ConfigError, match=sentence):
            read()
        assert time.process_time() - begin < 10 and tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("bomb", YAML_BOMBS)
def test_yaml_is_bounded(tmp_path: Path, bomb: str) -> None:
    pytest.importorskip("yaml")
    text, sentence = YAML_BOMBS[bomb]
    path = tmp_path / "a.yaml"
    path.write_bytes(text.encode())
    refuse(lambda: read_yaml(str(path), "--config a.yaml"), f"--config a.yaml.*{sentence}")


@pytest.mark.parametrize("bomb", JSON_BOMBS)
def test_json_is_bounded(tmp_path: Path, bomb: str) -> None:
    text, sentence = JSON_BOMBS[bomb]
    path = tmp_path / "a.json"
    path.write_bytes(text.encode())
    refuse(lambda: read_json(str(path), "--config a.json"), f"--config a.json.*{sentence}")


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    fifo, latin = tmp_path / "pipe", tmp_path / "latin"
    os.mkfifo(fifo)
    latin.write_bytes(b"lr: \xe9")
    places = {
        "/dev/zero": "cannot be read: it is a device", str(fifo): "cannot be read: it is a pipe",
        str(tmp_path): "cannot be read: (it is a folder|Is a dir)",
        "a\0b": "cannot be read: embedded null", "a\ud800": "cannot be read: .*surrogates not allowed",
        str(tmp_path / "absent"): "cannot be read: No such file", str(latin): "is not UTF-8 text: .* at byte 4",
    }  # fmt: skip
    for place, sentence in places.items():
        refuse(lambda place=place: read_text(place, "--flag file"), f"--flag file {sentence}")  # type: ignore[misc]


def test_aliases_merges_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "a.yaml"
    path.write_bytes(
        b"\xef\xbb\xbfbase: &base {lr: 1.0e-4, clip_grad: 1}\nrun:\n  <<: *base\n  clip_grad: 2\ntwo: *base\n"
    )
    base = {"lr": 1e-4, "clip_grad": 1}
    assert read_yaml(str(path), "x") == {"base": base, "run": {"lr": 1e-4, "clip_grad": 2}, "two": base}
    path.write_text(json.dumps({"a": list(range(1000))}))
    assert read_json(str(path), "x") == read_yaml(str(path), "x") == {"a": list(range(1000))}


@pytest.mark.parametrize("flag", ["--config", "--deepspeed_config", "--train-weighted-split-paths-path"])
def test_every_file_of_flags_is_read_so(tmp_path: Path, flag: str) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 10_000)
    for place, sentence in (("/dev/zero", f"{flag} /dev/zero is a device"), (str(deep), f"{flag} .*deep.json ")):
        refuse(lambda place=place: parse([flag, place]), sentence)  # type: ignore[misc]
