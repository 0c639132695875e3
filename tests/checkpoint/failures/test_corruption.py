"""Damaged and hostile checkpoints: found before a tensor is touched, and recovery goes back to the older good one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import (
    DamagedError,
    SaveOptions,
    load,
    read_record,
    read_tensors,
    save,
    verify,
)
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.storage import Storage
from megatron.errors import CheckpointError
from megatron.parallel.mesh import ParallelMesh
from tests.checkpoint.made.fake_pieces import SHAPES, cut_for_ranks, make_state, whole_sink
from tests.checkpoint.made.versions import FORMS, rewrite, sealed

MESH = ParallelMesh.single()
FILE = "pieces_00000.safetensors"
CHUNK_BYTES = 8192  # the header shares its chunk with data, as it does with chunks of 16 MiB
STATE = make_state({**SHAPES, "large": (64, 40)})


def save_step(directory: Path, step: int, seed: int = 0, form: str = "version 2") -> Path:
    pieces = cut_for_ranks(STATE, 1, seed)[0]
    path = save(directory, step, pieces, {"progress": {"step": step}}, MESH, SaveOptions(chunk_bytes=CHUNK_BYTES))
    if form != "version 2":
        rewrite(path, form)
    return path


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest the way an attacker would: with a digest that fits."""
    values = json.loads(path.read_text())
    del values["digest"]
    change(values)
    path.write_bytes(sealed(json.dumps(values)[:-1].encode() + b",\n"))


def put(*places: Any) -> Callable[[dict[str, Any]], object]:
    """A change: the last argument is put where the others lead."""
    *way, last, value = places

    def change(values: dict[str, Any]) -> None:
        target: Any = values
        for place in way:
            target = target[place]
        target[last] = value

    return change


SPARE = ("0" * 64, ["0" * 64])


def shrink(values: dict[str, Any], size_bytes: int) -> None:
    """The only file is said to be smaller."""
    values["files"][0][1] = size_bytes
    values["files"][0][3] = ["0" * 64] * -(-size_bytes // values["chunk_bytes"])


# Each bound and rule of a table once; the campaign "manifests" draws thousands of combinations.
VERSION_2: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (put("format", "pickle"), "has format 'pickle'"),
    (put("format_version", 3), "has format_version 3; this program reads 2. Read it with"),
    (put("format_version", True), "has format_version True; this program reads 2"),
    (put("step", 7), "is for step 7, but its folder is for step 2"),
    (put("step", True), "step is True, not an integer in range"),
    (put("step", -1), "step is -1, not an integer in range"),
    (put("step", 2**70), f"step is {2**70}, not an integer in range"),
    (put("run", 5), "run is 5, not a name"),
    (put("record", [1]), "record is not an object"),
    (put("record", {"a": [0] * 2**20}), "is not a manifest: it has more than 1048576 values"),
    (put("chunk_bytes", 0), "chunk_bytes is 0"),
    (put("chunk_bytes", 2**40), "chunk_bytes is 1099511627776"),
    (put("files", 0, [1]), "files is not a list of rows of 4"),
    (put("files", 0, 0, "../../etc/passwd"), "file name '../../etc/passwd' is not of the form"),
    (put("files", 0, 0, "/etc/passwd"), "file name '/etc/passwd' is not of the form"),
    (put("files", 0, 0, f"{FILE}\n"), r"file name '.*\\n' is not of the form"),
    (put("files", 0, 1, 2**61), "does not match its number of chunk digests"),
    (put("files", 0, 2, "abc"), f"'abc' is not a SHA-256 digest of {FILE}"),
    (put("files", 0, 3, 0, 5), f"5 is not a SHA-256 digest of {FILE}"),
    (lambda values: values["files"].append(values["files"][0]), "a file appears twice"),
    (lambda values: values["files"].append(["pieces_00001.safetensors", 64, *SPARE]), "pieces_00001.* has no pieces"),
    (lambda values: shrink(values, 8), f"{FILE} has 8 bytes, less than its pieces and header take"),
    (lambda values: values["tensors"].append(values["tensors"][0]), "a tensor appears twice"),
    (lambda values: values["tensors"].append(["more", [1]]), "tensor more has no pieces"),
    (put("tensors", 0, 0, 5), "tensor name 5 is not a string of up to 500 printable"),
    (put("tensors", 0, 0, "x" * 501), "is not a string of up to 500 printable"),
    (put("tensors", 0, 0, "a\x1b]0;b\x07"), r"'a\\x1b\]0;b\\x07' is not a string of up to 500 printable"),
    (put("tensors", 0, 1, "x"), "shape of .* is not a list of numbers"),
    (put("tensors", 0, 1, [2**40, 2**40]), "shape of .* is too large"),
    (put("kinds", ["x"] * 4), "unknown kind or element type"),
    (put("types", ["x"] * 9), "unknown kind or element type 'x'"),
    (put("pieces", 0, 0, 99), "index 99 is out of range"),
    (put("pieces", 0, 1, 1.5), "an index is 1.5, not an integer in range"),
    (put("pieces", 0, 4, [100, 100]), r"box \[.*\] is not within shape"),
    (put("pieces", 0, 6, 10**6), "range .* is not within a box"),
    (put("pieces", 0, 7, 1), "index 1 is out of range"),
    (lambda values: values.update(pieces=[], files=[], tensors=[]), "it lists no pieces"),
    (lambda values: values["pieces"].pop(), "is incomplete: tensor .* are missing|has no pieces"),
    (lambda values: values["pieces"].append(values["pieces"][-1]), "is incomplete: tensor .* are in two pieces"),
    (lambda values: values["pieces"][0].extend([0, 1]), r"has parts of 1 in steps of 0"),
    (lambda values: values["pieces"][0].extend([1, 10**9]), r"has parts of 1000000000 in steps of 1"),
    (lambda values: values["pieces"][0].extend([2**61, 1]), r"index \d+ is out of range"),
    (lambda values: values["pieces"][0].extend([1]), "pieces is not a list of rows of 8 or 10"),
    (put("indexes", [["index_00000.json", 5, "0" * 64, 1]]), "it has both files and index files"),
]
INDEXED: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (put("indexes", 0, 0, "../index_00000.json"), "index file name '../index_00000.json' is not of"),
    (put("indexes", 0, 1, -1), "size of index_00000.json is -1, not an integer in range"),
    (put("indexes", 0, 1, 2**50), r"has 1125899906842624 bytes; a manifest for files of these sizes has at"),
    (put("indexes", 0, 2, "0" * 64), "it does not match the digest in the manifest"),
    (put("indexes", 0, 2, 5), "5 is not a SHA-256 digest of index_00000.json"),
    (put("indexes", 0, 3, 0), "index_00000.json has no files"),
    (put("indexes", 0, 3, 2), "it has 1 files and should have 2"),
    (put("indexes", 0, 3, 2**61), r"it has \d+ files; 1048576 are allowed"),
    (lambda values: values["indexes"].append(values["indexes"][0]), "an index file appears twice"),
    (put("run", "other"), "it is not an index file of this checkpoint"),
]
CASES = [*(("version 2", *case) for case in VERSION_2), *(("indexed", *case) for case in INDEXED)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint in every form."""
    return {form: save_step(tmp_path_factory.mktemp("saved"), 2, form=form) for form in FORMS}


@pytest.mark.parametrize(("form", "change", "text"), CASES, ids=range(len(CASES)))
def test_a_malicious_manifest_is_rejected(
    tmp_path: Path, saved: dict[str, Path], form: str, change: Callable[[dict[str, Any]], object], text: str
) -> None:
    path = Path(shutil.copytree(saved[form], tmp_path / saved[form].name))
    reseal(path / "manifest.json", change)
    with pytest.raises(CheckpointError, match=text):
        list(read_manifest(path).files)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_loads(saved: dict[str, Path], form: str) -> None:
    sink = whole_sink(STATE)
    load(saved[form], sink.wanted(), MESH)
    sink.check()
    assert verify(saved[form]).step == 2


def test_a_huge_a_changed_and_an_empty_manifest_are_rejected(tmp_path: Path) -> None:
    path = save_step(tmp_path, 2)
    text = (path / "manifest.json").read_text()
    with (path / "manifest.json").open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(DamagedError, match=r"has 1099511627776 bytes; a manifest for files of these sizes has at most"):
        read_record(path)
    (path / "manifest.json").write_text(text.replace('"step": 2', '"step": 3', 1))
    with pytest.raises(DamagedError, match="its content does not match digest"):
        read_record(path)
    (path / "manifest.json").write_text("")
    with pytest.raises(DamagedError, match="does not end with its digest"):
        read_record(path)


def test_swapped_chunks_inside_a_file_are_detected(tmp_path: Path) -> None:
    path = save_step(tmp_path, 2)
    content = bytearray((path / FILE).read_bytes())
    last = len(content) // CHUNK_BYTES - 1
    first, second = (slice(at * CHUNK_BYTES, (at + 1) * CHUNK_BYTES) for at in (last - 1, last))
    content[first], content[second] = content[second], content[first]
    (path / FILE).write_bytes(content)
    with pytest.raises(DamagedError, match=f"{FILE} is damaged between bytes"):
        load(path, whole_sink(STATE).wanted(), MESH)
    assert read_manifest(path).step == 2


def test_a_wrong_digest_of_a_whole_file_is_detected(tmp_path: Path) -> None:
    path = save_step(tmp_path, 2)
    reseal(path / "manifest.json", put("files", 0, 2, "0" * 64))
    with pytest.raises(DamagedError, match=f"{FILE} does not match the digest in its manifest"):
        verify(path)


def test_a_file_of_wrong_size_is_detected_on_open(tmp_path: Path) -> None:
    path = save_step(tmp_path, 2)
    with (path / FILE).open("ab") as file:
        file.write(b"x")
    with pytest.raises(DamagedError, match=rf"{FILE} has \d+ bytes; its manifest expects \d+"):
        list(read_tensors(path, kind="master"))


def test_a_file_that_shrinks_while_being_read_is_reported_as_damage(tmp_path: Path) -> None:
    class Shrinking(Storage):
        """Says the right size, but the bytes are gone."""

        def read_into(self, handle: int, target: memoryview, offset_bytes: int) -> int:
            return 0

    path = save_step(tmp_path, 2)
    with pytest.raises(DamagedError, match=r"cannot read .*manifest.json: the file ends at byte 0"):
        read_manifest(path, Shrinking())
