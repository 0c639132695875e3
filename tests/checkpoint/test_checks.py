"""Untrusted values are bounded, well-formed and finite before anything is made of them."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from megatron.checkpoint import checks
from megatron.checkpoint.checks import (
    HeaderEntry,
    check_extent,
    first_not_finite,
    header_problem,
    longest_header_bytes,
    parse_bounded,
)
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.snapshot import TORCH_TYPES, piece_name
from tests.checkpoint.made.saved_state import save_state

MOST_RECORD_VALUES = 2**20


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'"\xc3\xa9"', "has bytes that are not ASCII"),
        (b'{"a": 1, "a": 2}', "a name appears twice in one object"),
        (b"[NaN]", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"[1e999]", "the number 1e999 is too large"),
        (b"[" + b"9" * 5000 + b"]", "Exceeds the limit"),
        (b"[" * 900_000, "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
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
    monkeypatch.setattr(checks, "LARGEST_BYTES", 2**23)
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
        taken, count = peak, count + count // 2 + 1
    assert "would take about" in refused and "bytes of memory; 8388608 are allowed" in refused
    assert 2**23 / 6 < taken < 1.1 * 2**23
    assert peak < 3 * len(text) + 2**22


def test_the_extent_of_a_record_is_bounded() -> None:
    check_extent({"a": [1] * 1000, "b": {"c": "x" * 1000}})
    deep = json.loads("[" * 65 + "]" * 65)
    for value, said in (
        (deep, "nested at least 65 levels deep; 64"),
        ({"a": [10**19]}, r"1000\d+\.\.\. is not an int"),
    ):
        with pytest.raises(ValueError, match=said):
            check_extent(value)
    check_extent(deep[0])
    check_extent([1 - 10**19])
    wide: Any = [0] * MOST_RECORD_VALUES
    for value in (wide, {"a": {str(number): 0 for number in range(MOST_RECORD_VALUES // 2 + 1)}}, "x" * (2**24 + 1)):
        with pytest.raises(ValueError, match=r"more than \d+ values or \d+ characters"):
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


Header = dict[str, Any]


def header_of(path: Path) -> Header:
    content = path.read_bytes()
    return dict(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]))


def expected_of(folder: Path) -> dict[str, HeaderEntry]:
    return {
        piece_name(piece.key): HeaderEntry(piece.dtype, piece.key.numel, piece.begin_bytes, piece.end_bytes)
        for piece in read_manifest(folder).catalogue.pieces_of(0)
    }


def changed(header: Header, change: Callable[[Header], object], size: int) -> bytes:
    change(header)
    return json.dumps(header, separators=(",", ":")).encode().ljust(size)


def first(header: Header) -> str:
    return next(name for name in header if name != "__metadata__")


def rename(header: Header) -> None:
    header["other"] = header.pop(first(header))


CHANGES: list[tuple[Callable[[Header], object], str]] = [
    (lambda header: header.pop(first(header)), r"its header lists \d+ pieces, but the manifest lists \d+"),
    (lambda header: header.update(more=header[first(header)]), r"its header lists \d+ pieces"),
    (rename, r"its header disagrees with the manifest about piece .*\|"),
    (lambda header: header[first(header)].update(dtype="F16"), "its header disagrees with the manifest"),
    (lambda header: header[first(header)].update(shape=[2**63]), "its header disagrees with the manifest"),
    (lambda header: header[first(header)].update(data_offsets=[-4, 0]), "its header disagrees with the manifest"),
    (lambda header: header.update({first(header): []}), "its header disagrees with the manifest"),
]


def test_the_header_of_a_save_agrees_and_other_programs_read_the_file(tmp_path: Path) -> None:
    folder = save_state(tmp_path)
    expected = expected_of(folder)
    path = folder / "pieces_00000.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    assert header_problem(content[8 : 8 + size], expected) is None
    assert size < longest_header_bytes(expected)
    with safe_open(path, "pt") as file:
        assert len(file.keys()) == len(expected)


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=range(len(CHANGES)))
def test_a_header_that_differs_is_described(tmp_path: Path, change: Callable[[Header], object], said: str) -> None:
    folder = save_state(tmp_path)
    path = folder / "pieces_00000.safetensors"
    size = int.from_bytes(path.read_bytes()[:8], "little")
    problem = header_problem(changed(header_of(path), change, size), expected_of(folder))
    assert problem is not None
    with pytest.raises(ValueError, match=said):
        raise ValueError(problem)


FLOATS = ("F64", "F32", "F16", "BF16")


def content(values: torch.Tensor) -> memoryview:
    return values.view(torch.uint8).numpy().data


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_the_first_is_found_wherever_it_is(dtype: str, value: float) -> None:
    for place in (0, 1, 131_071, 131_072, 299_999):
        values = torch.zeros(300_000, dtype=TORCH_TYPES[dtype])
        values[place:] = value
        assert first_not_finite(content(values), dtype) == place


@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_values_of_every_size_pass(dtype: str) -> None:
    limits = torch.finfo(TORCH_TYPES[dtype])
    values = torch.tensor(
        [0.0, -0.0, limits.max, limits.min, limits.tiny, limits.smallest_normal / 2], dtype=TORCH_TYPES[dtype]
    )
    assert values.isfinite().all()
    assert first_not_finite(content(values), dtype) is None
