"""Damaged and hostile checkpoints: found before a tensor is touched, and recovery goes back to the older good one."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import (
    DamagedError,
    LoadedCheckpoint,
    SaveOptions,
    load,
    load_newest,
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
from tests.checkpoint.made.versions import FORMS, rewrite

MESH = ParallelMesh.single()
FILE, INDEX = "pieces_00000.safetensors", "index_00000.json"
CHUNK_BYTES = 8192  # the header shares its chunk with data, as it does with chunks of 16 MiB
STATE = make_state({**SHAPES, "large": (64, 40)})


def save_step(directory: Path, step: int, seed: int = 0, form: str = "version 2") -> Path:
    pieces = cut_for_ranks(STATE, 1, seed)[0]
    path = save(directory, step, pieces, {"progress": {"step": step}}, MESH, SaveOptions(chunk_bytes=CHUNK_BYTES))
    if form != "version 2":
        rewrite(path, form)
    return path


def flip_bit(path: Path, random_numbers: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = random_numbers.randrange(len(content))
    content[at] ^= 1 << random_numbers.randrange(8)
    path.write_bytes(content)


def change_run(path: Path, random_numbers: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = random_numbers.randrange(len(content))
    old = bytes(content[at : at + 16])
    while bytes(content[at : at + len(old)]) == old:
        content[at : at + len(old)] = random_numbers.randbytes(len(old))
    path.write_bytes(content)


def truncate(path: Path, random_numbers: random.Random) -> None:
    os.truncate(path, random_numbers.randrange(path.stat().st_size))


def extend(path: Path, random_numbers: random.Random) -> None:
    with path.open("ab") as file:
        file.write(random_numbers.randbytes(random_numbers.randint(1, 64)))


def zero_page(path: Path, random_numbers: random.Random) -> None:
    content = bytearray(path.read_bytes())
    size = min(512, len(content))
    at = random_numbers.randrange(max(1, len(content) // size)) * size
    content[at : at + size] = bytes(len(content[at : at + size]))
    path.write_bytes(content)


def remove(path: Path, random_numbers: random.Random) -> None:
    path.unlink()


def other_step(path: Path, random_numbers: random.Random) -> None:
    shutil.copyfile(path.parent.parent / "iter_0000001" / path.name, path)


def link(path: Path, random_numbers: random.Random) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def fifo(path: Path, random_numbers: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def edit_manifest(path: Path, random_numbers: random.Random) -> None:
    path = path.with_name("manifest.json")
    text = path.read_text()
    places = [at for at, letter in enumerate(text) if letter.isdigit()]
    at = random_numbers.choice(places)
    path.write_text(text[:at] + str((int(text[at]) + random_numbers.randint(1, 9)) % 10) + text[at + 1 :])


def drop_a_line(path: Path, random_numbers: random.Random) -> None:
    path = path.with_name("manifest.json")
    lines = path.read_text().splitlines(keepends=True)
    del lines[random_numbers.randrange(len(lines))]
    path.write_text("".join(lines))


MUTATIONS: list[tuple[Callable[[Path, random.Random], None], int]] = [
    (flip_bit, 120),
    (change_run, 50),
    (truncate, 30),
    (extend, 10),
    (zero_page, 30),
    (remove, 1),
    (other_step, 1),
    (link, 1),
    (fifo, 1),
    (edit_manifest, 30),
    (drop_a_line, 10),
]


TRIALS = [
    (name, mutation, times)
    for mutation, times in MUTATIONS
    for name in (FILE, "manifest.json", INDEX)
    if name == "manifest.json" or mutation not in (edit_manifest, drop_a_line)
]


@pytest.mark.parametrize(("name", "mutation", "times"), TRIALS, ids=[f"{name}-{m.__name__}" for name, m, _ in TRIALS])
def test_every_mutation_is_detected_before_a_tensor_is_modified(
    tmp_path: Path, name: str, mutation: Callable[[Path, random.Random], None], times: int
) -> None:
    form = "indexed" if name == INDEX else "version 2"
    save_step(tmp_path, 1, seed=1, form=form)
    damaged = save_step(tmp_path, 2, seed=2, form=form)
    copy = tmp_path / "copy-of-2"
    damaged.rename(copy)
    random_numbers = random.Random(f"{mutation.__name__} {name}")
    for trial in range(times):
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(copy, damaged)
        mutation(damaged / name, random_numbers)
        touched: list[Any] = []
        with pytest.raises(DamagedError, match="iter_0000002"):
            load(damaged, [(key, touched.append) for key, _ in whole_sink(STATE).expected], MESH)
        assert not touched
        if trial % 10 == 0:
            sink = whole_sink(STATE)
            assert load_newest(tmp_path, sink.wanted, MESH) == LoadedCheckpoint(
                {"progress": {"step": 1}}, tmp_path / "iter_0000001"
            )
            sink.check()


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest the way an attacker would: with a digest that fits."""
    values = json.loads(path.read_text())
    del values["digest"]
    change(values)
    seal(path, json.dumps(values)[:-1] + ",\n")


def seal(path: Path, text: str) -> None:
    path.write_text(text + f'"digest": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n')


def put(*places: Any) -> Callable[[dict[str, Any]], object]:
    """A change: the last argument is put where the others lead."""
    *way, last, value = places

    def change(values: dict[str, Any]) -> None:
        target: Any = values
        for place in way:
            target = target[place]
        target[last] = value

    return change


def shrink(values: dict[str, Any], size_bytes: int) -> None:
    """The only file is said to be smaller."""
    values["files"][0][1] = size_bytes
    values["files"][0][3] = ["0" * 64] * -(-size_bytes // values["chunk_bytes"])


def spare_file(values: dict[str, Any]) -> list[Any]:
    """Another file."""
    return ["pieces_00001.safetensors", 64, "0" * 64, ["0" * 64]]


def first_of_two(values: dict[str, Any]) -> None:
    """Two pieces of one size say that they hold the same elements."""
    rows = values["pieces"]
    one, other = next(
        (one, other)
        for one in rows
        for other in rows
        if one is not other
        and one[:3] == other[:3]
        and one[3:5] == other[3:5]
        and one[6] - one[5] == other[6] - other[5]
    )
    one[5:7] = other[5:7]


HOSTILE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (put("format", "pickle"), "has format 'pickle'"),
    (put("format_version", 3), "has format_version 3; this program reads 2. Read it with the program version"),
    (put("step", 7), "is for step 7, but its folder is for step 2"),
    (put("step", -1), "step is -1"),
    (put("step", 2**70), "not an integer in range"),
    (put("step", True), "step is True"),
    (put("chunk_bytes", 0), "chunk_bytes is 0"),
    (put("chunk_bytes", 2**40), "chunk_bytes is 1099511627776"),
    (put("record", [1]), "record is not an object"),
    (put("files", "x"), "files is not a list of rows"),
    (put("files", 0, [1]), "files is not a list of rows of 4"),
    (put("files", 0, 0, "../../etc/passwd"), "file name '../../etc/passwd' is not of the form"),
    (put("files", 0, 0, "/etc/passwd"), "file name '/etc/passwd' is not of the form"),
    (put("files", 0, 0, "pieces_00000.safetensors\n"), "is not of the form"),
    (put("files", 0, 1, 2**61), "does not match its number of chunk digests"),
    (put("files", 0, 2, "abc"), "'abc' is not a SHA-256 digest"),
    (put("files", 0, 3, 0, 5), "5 is not a SHA-256 digest"),
    (lambda values: values["files"].append(values["files"][0]), "a file appears twice"),
    (lambda values: values["tensors"].append(values["tensors"][0]), "a tensor appears twice"),
    (put("tensors", 0, 0, 5), "tensor name 5 is not a string"),
    (put("tensors", 0, 1, [2**40, 2**40]), "shape of .* is too large"),
    (put("tensors", 0, 1, "x"), "shape of .* is not a list of numbers"),
    (put("tensors", 0, 1, [1] * 17), "shape of .* is not a list of numbers"),
    (put("pieces", 0, 0, 99), "index 99 is out of range"),
    (put("pieces", 0, 1, 1.5), "an index is 1.5"),
    (put("pieces", 0, 2, 0), "have different element types|less than its pieces and header"),
    (put("kinds", ["x"] * 4), "unknown kind"),
    (put("types", ["x"] * 9), "unknown kind or element type 'x'"),
    (put("pieces", 0, 4, [100, 100]), r"box \[.*\] is not within shape"),
    (put("pieces", 0, 6, 10**6), "range .* is not within a box"),
    (put("run", 5), "run is 5, not a name"),
    (put("run", "x" * 501), "run is 'x+\\.\\.\\., not a name"),
    (put("format_version", True), "has format_version True; this program reads 2"),
    (
        put("tensors", 0, 0, "a\x1b]0;b\x07"),
        r"tensor name 'a\\x1b\]0;b\\x07' is not a string of up to 500 printable characters",
    ),
    (put("tensors", 0, 0, "a\nb"), r"tensor name 'a\\nb' is not a string"),
    (put("tensors", 0, 0, "\ud800"), r"tensor name '\\ud800' is not a string"),
    (put("tensors", 0, 0, "x" * 501), "is not a string of up to 500 printable characters"),
    (lambda values: values["tensors"].append(["more", [1]]), "tensor more has no pieces"),
    (put("pieces", []), "has no pieces"),
    (lambda values: values.update(pieces=[], files=[], tensors=[]), "it lists no pieces"),
    (lambda values: first_of_two(values), r"is incomplete: .* are (missing|in two piece)"),
    (put("record", {"a": [0] * 2**20}), "is not a manifest: it has more than 1048576 values"),
    (put("pieces", 0, 7, 1), "index 1 is out of range"),
    (lambda values: values["files"].clear(), "index 0 is out of range"),
]
VERSION_2: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda values: values["pieces"].pop(), "is incomplete: tensor .* are missing|has no pieces"),
    (lambda values: values["pieces"].append(values["pieces"][-1]), "is incomplete: tensor .* are in two pieces"),
    (put("files", 0, 1, CHUNK_BYTES), "does not match its number of chunk digests"),
    (lambda values: shrink(values, 8), r"has \d+ bytes, less than its pieces and header"),
    (lambda values: values["files"].append(spare_file(values)), "pieces_00001.safetensors has no pieces"),
    (lambda values: values["pieces"][0].extend([0, 1]), r"has parts of 1 in steps of 0"),
    (lambda values: values["pieces"][0].extend([1, 0]), r"has parts of 0 in steps of 1"),
    (lambda values: values["pieces"][0].extend([1, 10**9]), r"has parts of 1000000000 in steps of 1"),
    (lambda values: values["pieces"][0].extend([1, 1]), r"index \d+ is out of range"),
    (lambda values: values["pieces"][0].extend([2**61, 1]), r"index \d+ is out of range"),
    (lambda values: values["pieces"][0].extend([1]), "pieces is not a list of rows of 8 or 10"),
    (put("indexes", [["index_00000.json", 5, "0" * 64, 1]]), "it has both files and index files"),
]
INDEXED: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (put("indexes", 0, 0, "../index_00000.json"), "index file name '../index_00000.json' is not of the form"),
    (put("indexes", 0, 1, -1), "size of index_00000.json is -1"),
    (put("indexes", 0, 1, 2**50), r"has 1125899906842624 bytes; a manifest for files of these sizes has at most"),
    (put("indexes", 0, 1, 5), "index_00000.json is damaged: it does not match the digest in the manifest"),
    (put("indexes", 0, 2, "0" * 64), "it does not match the digest in the manifest"),
    (put("indexes", 0, 2, 5), "5 is not a SHA-256 digest of index_00000.json"),
    (put("indexes", 0, 3, 0), "index_00000.json has no files"),
    (put("indexes", 0, 3, 2), "it has 1 files and should have 2"),
    (put("indexes", 0, 3, 2**61), r"it has \d+ files; 1048576 are allowed"),
    (lambda values: values["indexes"].append(values["indexes"][0]), "an index file appears twice"),
    (put("run", "other"), "index_00000.json is not a valid manifest: it is not an index file of this checkpoint"),
    (put("chunk_bytes", 64), "does not match its number of chunk digests"),
]
CASES = [
    *(("version 2", *case) for case in [*HOSTILE, *VERSION_2]),
    *(("indexed", *case) for case in INDEXED),
]


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{" + '"a": ' + "[" * 200_000 + "]" * 200_000 + ",\n", "is not a manifest"),
        ('{"a": 1, "a": 2,\n', "a name appears twice"),
        ('{"a": NaN,\n', "NaN is not JSON"),
        ('{"a": ' + "9" * 100_000 + ",\n", "is not a manifest"),
        ('{"a" 1,\n', "is not a manifest"),
    ],
    ids=["depth", "twice", "nan", "digits", "syntax"],
)
def test_a_json_bomb_is_rejected_quickly(tmp_path: Path, text: str, said: str) -> None:
    path = save_step(tmp_path, 2)
    seal(path / "manifest.json", text)
    began = time.process_time()
    with pytest.raises(CheckpointError, match=said):
        read_record(path)
    assert time.process_time() - began < 2


def test_non_object_json_and_a_huge_manifest_are_rejected(tmp_path: Path) -> None:
    path = save_step(tmp_path, 2)
    with (path / "manifest.json").open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(DamagedError, match=r"has 1099511627776 bytes; a manifest for files of these sizes has at most"):
        read_record(path)
    (path / "manifest.json").write_text("")
    with pytest.raises(DamagedError, match="does not end with its digest"):
        read_record(path)


def test_a_changed_digit_is_reported_as_damage(tmp_path: Path) -> None:
    path = save_step(tmp_path, 2)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"step": 2', '"step": 3', 1))
    with pytest.raises(DamagedError, match="its content does not match digest"):
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
