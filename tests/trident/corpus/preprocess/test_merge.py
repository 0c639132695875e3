"""Merging token files: the bytes of the whole, sizes beyond 2^31, honest refusals, and nothing half-written."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.formats.index_layout import MMAP_HEADER, MMAP_MAGIC
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.data.formats.sidecar import Sidecar, read_sidecar
from megatron.errors import ConfigError, DataError, StorageError
from megatron.parallel.messages import all_gather_json
from megatron.tokenizers.record import TokenizerRecord
from tests.data.corpora import write_sidecar
from tests.helpers.ranks import run_ranks
from trident.corpus.preprocess import merge as merge_module
from trident.corpus.preprocess.merge import merge
from trident.corpus.workers.ranks import JobRanks

Documents = list[list[np.ndarray]]


def documents(count: int, seed: int) -> Documents:
    drawn = np.random.default_rng(seed)
    return [[drawn.integers(0, 500, drawn.integers(0, 40)) for _ in range(drawn.integers(0, 4))] for _ in range(count)]


def write(prefix: Path, content: Documents, dtype: Any = np.uint16, is_cached: bool = False) -> str:
    with IndexedWriter(prefix, dtype, is_cached=is_cached) as writer:
        for document in content:
            writer.add_document(document)
    return str(prefix)


def files(prefix: str | Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def parts(tmp_path: Path) -> tuple[list[str], str]:
    """Four pairs, one of them empty, and the pair of all their documents."""
    contents = [documents(30, 1), [], documents(1, 2), documents(50, 3)]
    prefixes = [write(tmp_path / f"part{number}", content) for number, content in enumerate(contents)]
    return prefixes, write(tmp_path / "whole", [document for content in contents for document in content])


def test_merged_is_the_whole(tmp_path: Path, parts: tuple[list[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_module, "_COPIED_BYTES", 100)
    monkeypatch.setattr(merge_module, "_CHUNK_ENTRIES", 7)
    plan = merge(parts[0], str(tmp_path / "folder" / "merged"))
    assert files(tmp_path / "folder" / "merged") == files(parts[1])
    assert plan.index.bin_bytes == os.path.getsize(parts[1] + ".bin")
    assert names(tmp_path / "folder") == ["merged.bin", "merged.idx"]


def test_the_cached_layout_is_kept_unless_it_is_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_module, "_CHUNK_ENTRIES", 7)
    contents = [documents(30, 1), [], documents(20, 2)]
    cached = [write(tmp_path / f"c{number}", one, np.int32, True) for number, one in enumerate(contents)]
    plain = [write(tmp_path / f"p{number}", one, np.int32) for number, one in enumerate(contents)]
    both = [document for one in contents for document in one]
    merge(cached, str(tmp_path / "merged"))
    assert files(tmp_path / "merged") == files(write(tmp_path / "whole", both, np.int32, True))
    merge([cached[0], plain[1], cached[2]], str(tmp_path / "mixed"))
    assert files(tmp_path / "mixed") == files(write(tmp_path / "mmap", both, np.int32))
    narrow = write(tmp_path / "narrow", contents[0])
    with pytest.raises(DataError, match=r"c0 holds int32 and .*narrow holds uint16"):
        merge([cached[0], narrow], str(tmp_path / "out"))


def test_a_second_merge_replaces_the_first(tmp_path: Path, parts: tuple[list[str], str]) -> None:
    merge(parts[0], str(tmp_path / "merged"))
    merge(parts[0][:1], str(tmp_path / "merged"))
    assert files(tmp_path / "merged") == files(parts[0][0])


def fabricate(prefix: Path, lengths: list[int]) -> str:
    """A sparse pair of uint16 with sequences of these lengths, each a document; its last token is 7."""
    table = np.array(lengths, "<i8")
    pointers = 2 * (np.cumsum(table) - table)
    head = MMAP_HEADER.pack(MMAP_MAGIC, 1, 8, len(table), len(table) + 1)
    tables = [table.astype("<i4"), pointers.astype("<i8"), np.arange(len(table) + 1, dtype="<i8")]
    Path(f"{prefix}.idx").write_bytes(head + b"".join(part.tobytes() for part in tables))
    with open(f"{prefix}.bin", "wb") as stream:
        stream.truncate(2 * int(table.sum()))
        stream.seek(-2, os.SEEK_END)
        stream.write(b"\x07\x00")
    return str(prefix)


def test_more_than_two_to_the_31_tokens_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_last_bytes(source: int, target: int, size: int, offset: int) -> int:
        os.pwrite(target, os.pread(source, 2, size - 2), offset + size - 2)
        return size

    monkeypatch.setattr(merge_module, "_copy_bytes", copy_last_bytes)  # the others are holes
    longest = 2**31 - 1
    first = fabricate(tmp_path / "a", [longest, 5, longest])
    second = fabricate(tmp_path / "b", [3, 2**30])
    plan = merge([first, second], str(tmp_path / "out"))
    merged = IndexedDataset(tmp_path / "out")
    assert plan.index.tokens == merged.tokens == 2 * longest + 8 + 2**30
    assert merged.pointers.tolist() == [0, 2 * longest, 2 * longest + 10, 4 * longest + 10, 4 * longest + 16]
    assert merged.documents.tolist() == [0, 1, 2, 3, 4, 5]
    assert merged.get(2, longest - 2).tolist() == [0, 7] and merged.get(4, 2**30 - 2).tolist() == [0, 7]
    assert merged.get(3).tolist() == [0, 0, 0]


def test_errors_name_both_sides_and_leave_nothing(tmp_path: Path, parts: tuple[list[str], str]) -> None:
    wide = write(tmp_path / "wide", documents(3, 4), np.int32)
    before = names(tmp_path)
    with pytest.raises(DataError, match=r"part0 holds uint16 and .*wide holds int32: pairs of different widths"):
        merge([*parts[0], wide], str(tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"--output-prefix .*part1 is also one of --datasets"):
        merge(parts[0], f"{tmp_path}/./part1")
    with pytest.raises(DataError, match=r"none\.idx does not exist"):
        merge([parts[0][0], str(tmp_path / "none")], str(tmp_path / "out"))
    assert names(tmp_path) == before


def test_modes_are_merged_and_never_mixed(tmp_path: Path) -> None:
    for name in "ab":
        prefix = write(tmp_path / name, [[np.arange(3)], [np.arange(4)]])
        with open(f"{prefix}.idx", "ab") as stream:
            stream.write(b"\x00\x01")
    merge([f"{tmp_path}/a", f"{tmp_path}/b"], f"{tmp_path}/out")
    modes = IndexedDataset(tmp_path / "out").modes
    assert modes is not None and modes.tolist() == [0, 1, 0, 1]
    plain = write(tmp_path / "plain", [[np.arange(3)]])
    with pytest.raises(DataError, match=r"a has a table of modes \(multimodal data\) and .*plain has none"):
        merge([plain, f"{tmp_path}/a"], f"{tmp_path}/other")


def test_invalid_ids_are_rejected(tmp_path: Path) -> None:
    Path(tmp_path / "f.idx").write_bytes(MMAP_HEADER.pack(MMAP_MAGIC, 1, 6, 0, 1) + bytes(8))
    Path(tmp_path / "f.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"f holds float64, not token ids"):
        merge([f"{tmp_path}/f"], f"{tmp_path}/out")


@pytest.mark.parametrize("call", ["copy", "table", "size"])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, parts: tuple[list[str], str], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(parts[0][:1], str(tmp_path / "out"))
    before = names(tmp_path), files(tmp_path / "out")

    def full(*words: Any, **more: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    if call == "copy":
        monkeypatch.setattr(merge_module, "_copy_bytes", full)
    elif call == "table":
        monkeypatch.setattr(merge_module, "write_at", full)
    else:
        monkeypatch.setattr(merge_module.Path, "mkdir", full)
    with pytest.raises(StorageError, match=r"Cannot write .*out\.bin: No space left on device"):
        merge(parts[0], str(tmp_path / "out"))
    monkeypatch.undo()
    assert (names(tmp_path), files(tmp_path / "out")) == before


def test_lost_and_changed_bytes_are_detected(
    tmp_path: Path, parts: tuple[list[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = names(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(merge_module, "_copy_bytes", lambda source, target, size, offset: size)
        with pytest.raises(DataError, match=r"bytes at offset 0 .*differ from offset 0 of .*part0\.bin"):
            merge(parts[0], str(tmp_path / "out"))
    with monkeypatch.context() as patch:
        patch.setattr(merge_module, "_copy_bytes", lambda source, target, size, offset: size - 2)
        with pytest.raises(DataError, match=r"part0\.bin ended at byte offset \d+ instead of \d+ while being copied"):
            merge(parts[0], str(tmp_path / "out"))
    with monkeypatch.context() as patch:
        patch.setattr(merge_module, "read_token_index", lambda *words: IndexedDataset(parts[0][0])._index)
        with pytest.raises(DataError, match=r"The merged index holds 30 sequences|holds \d+ sequences, 30 documents"):
            merge(parts[0], str(tmp_path / "out"))
    surveyed = merge_module._survey
    with monkeypatch.context() as patch:
        patch.setattr(merge_module, "_survey", lambda prefix: [*surveyed(prefix)[:4], 0, False, False])
        with pytest.raises(DataError, match=r"part0 was rewritten while it was being merged"):
            merge(parts[0], str(tmp_path / "out"))
    assert names(tmp_path) == before


def describe(prefix: str, fingerprint: str = "f" * 64, path: str = "a.jsonl") -> Sidecar:
    dataset = IndexedDataset(prefix)
    record = TokenizerRecord("GPT2BPETokenizer", fingerprint, 500, 499)
    sidecar = Sidecar(len(dataset.documents) - 1, 2, 1, len(dataset), dataset.tokens, True, record)
    write_sidecar(prefix, sidecar)
    return sidecar


def test_sidecars_are_merged_with_the_pairs(
    tmp_path: Path, parts: tuple[list[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [describe(prefix) for prefix in parts[0]]
    merge(parts[0], str(tmp_path / "out"))
    merged, whole = read_sidecar(tmp_path / "out"), IndexedDataset(parts[1])
    assert merged == replace(given[0], documents=81, sequences=len(whole), tokens=whole.tokens, empty=8, skipped=4)
    Path(parts[0][2] + ".json").unlink()
    merge(parts[0], str(tmp_path / "out"))
    assert "part2 has no sidecar (.json), so" in capsys.readouterr().err
    assert read_sidecar(tmp_path / "out") is None and not (tmp_path / "out.json").exists()
    describe(parts[0][2], "0" * 64)
    with pytest.raises(DataError, match=r"part0 was made with the tokenizer GPT2.* and .*part2 with .*0000"):
        merge(parts[0], str(tmp_path / "out"))
    write_sidecar(parts[0][2], replace(given[2], tokens=5, sequences=5))
    with pytest.raises(DataError, match=r"part2\.json lists 5 sequences and 5 tokens, but the pair has"):
        merge(parts[0], str(tmp_path / "out"))
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(DataError, match=r"mine\.json exists and does not describe token files"):
        merge(parts[0], str(tmp_path / "mine"))


def merge_on_rank(rank: int, prefixes: list[str], output: str, broken: bool) -> str:
    from megatron.config import ParallelRequest
    from megatron.parallel.joining import close_mesh, open_mesh

    mesh = open_mesh(ParallelRequest(distributed_backend="gloo"))
    ranks = JobRanks(mesh.world.rank, mesh.world.size, lambda value: all_gather_json(value, mesh.world))
    try:
        merge([*prefixes, f"{output}-gone"] if broken else prefixes, output, ranks)
    except DataError as failure:
        return str(failure)
    finally:
        close_mesh(mesh)
    return ""


def test_ranks_share_the_work_and_the_errors(tmp_path: Path, parts: tuple[list[str], str]) -> None:
    output = str(tmp_path / "out")
    assert run_ranks(merge_on_rank, 2, parts[0], output, False) == ["", ""]
    assert files(output) == files(parts[1])
    before = names(tmp_path)
    texts = run_ranks(merge_on_rank, 2, parts[0], str(tmp_path / "other"), True)
    assert all("other-gone.idx does not exist" in text for text in texts) and names(tmp_path) == before
