"""The header of a piece file beside the pieces that the manifest has in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from megatron.checkpoint.checks.header import HeaderEntry, header_problem, longest_header_bytes
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.snapshot import piece_name
from tests.checkpoint.saved_state import save_state

Header = dict[str, Any]


def header_of(path: Path) -> Header:
    content = path.read_bytes()
    return dict(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]))


def expected_of(folder: Path) -> dict[str, HeaderEntry]:
    return {
        piece_name(piece.key): HeaderEntry(piece.dtype, piece.key.numel, piece.begin_bytes, piece.end_bytes)
        for piece in read_manifest(folder).pieces
    }


def changed(header: Header, change: Callable[[Header], object], size: int) -> bytes:
    change(header)
    return json.dumps(header, separators=(",", ":")).encode().ljust(size)


def first(header: Header) -> str:
    return next(name for name in header if name != "__metadata__")


def rename(header: Header) -> None:
    header["other"] = header.pop(first(header))


CHANGES: list[tuple[Callable[[Header], object], str]] = [
    (lambda header: header.pop(first(header)), r"its header lists \d+ pieces, and the manifest has \d+ in it"),
    (lambda header: header.update(more=header[first(header)]), r"its header lists \d+ pieces"),
    (rename, r"its header says otherwise than the manifest of piece .*\|"),
    (lambda header: header[first(header)].update(dtype="F16"), "its header says otherwise"),
    (lambda header: header[first(header)].update(shape=[2**63]), "its header says otherwise"),
    (lambda header: header[first(header)].update(data_offsets=[-4, 0]), "its header says otherwise"),
    (lambda header: header.update({first(header): []}), "its header says otherwise"),
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


def test_a_header_that_is_no_object_is_described() -> None:
    assert "its header is no object" in str(header_problem(b"[]", {}))
    assert "not that of a safetensors file: Expecting value" in str(header_problem(b"", {}))
