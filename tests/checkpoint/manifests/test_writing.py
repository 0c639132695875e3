"""What is written is read again; index files are opened only for their own files; and a very large case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.checkpoint import load, verify
from megatron.checkpoint.manifest import MANIFEST_NAME, read_manifest
from megatron.checkpoint.manifests.reading import read_index
from megatron.checkpoint.manifests.writing import manifest_texts
from megatron.checkpoint.retention.copying import copy_checkpoint
from megatron.errors import CheckpointError, DamagedError
from megatron.parallel.mesh import ParallelMesh
from tests.checkpoint.made.fake_pieces import make_state, whole_sink
from tests.checkpoint.made.many_ranks import CHUNK_BYTES, Network
from tests.checkpoint.made.saved_state import CountingStorage, save_state
from tests.checkpoint.made.versions import rewrite
from trident.checkpoints.listing import COMPLETE, entries_in

MESH = ParallelMesh.single()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = save_state(tmp_path, 12)
    manifest = read_manifest(path)
    root, indexes = manifest_texts(12, manifest.run, manifest.record, 256, manifest.files, manifest.catalogue.runs)
    assert root == (path / MANIFEST_NAME).read_bytes()
    assert indexes == {} and json.loads(root)["indexes"] == []


def test_a_checkpoint_with_index_files_is_loaded_copied_and_listed(tmp_path: Path) -> None:
    path = save_state(tmp_path / "saved", 3)
    rewrite(path, "indexed")
    assert sorted(entry.name for entry in path.iterdir()) == [
        "index_00000.json", "manifest.json", "pieces_00000.safetensors",
    ]  # fmt: skip
    copy = copy_checkpoint(path, tmp_path / "copies", MESH, flag="--save")
    assert copy is not None and verify(copy).digest == verify(path).digest
    sink = whole_sink(make_state(seed=0))
    load(copy, sink.wanted(), MESH)
    sink.check()
    (entry,) = entries_in(tmp_path / "copies", CountingStorage())
    assert entry.state == COMPLETE
    (copy / "index_00000.json").unlink()
    (entry,) = entries_in(tmp_path / "copies", CountingStorage())
    assert "cannot read" in entry.problem and "index_00000.json" in entry.problem
    with pytest.raises(DamagedError, match=r"cannot read .*index_00000.json: No such file"):
        load(copy, sink.wanted(), MESH)
    assert copy_checkpoint(path, tmp_path / "copies", MESH, flag="--save", replaces=True) == copy


def test_an_index_file_of_another_save_is_damage(tmp_path: Path) -> None:
    path, other = (save_state(tmp_path / name, 3, seed) for seed, name in enumerate("ab"))
    for folder in (path, other):
        rewrite(folder, "indexed")
    (path / "index_00000.json").write_bytes((other / "index_00000.json").read_bytes())
    (index,) = read_manifest(path).indexes
    with pytest.raises(DamagedError, match="it does not match the digest in the manifest"):
        read_index(path, index, CountingStorage())


def test_the_record_must_be_json() -> None:
    with pytest.raises(CheckpointError, match="the record of the checkpoint is not JSON"):
        manifest_texts(1, "run", {"a": float("nan")}, 64, [], [])


def test_a_rank_opens_the_index_files_it_needs(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """7,000 ranks; with `--cases 10000` 16,384 ranks with a trillion parameters, whose root must stay below 5 MB."""
    large = pytestconfig.getoption("--cases") >= 10_000
    network = Network(16384, 108, 28672) if large else Network(7000, 4, 256)
    runs, files = network.runs(), network.files()
    assert len(runs) == 3 * len(network.shapes())
    sizes = network.write(tmp_path, runs, files)
    assert sizes["root_bytes"] < (5_000_000 if large else 50_000)
    assert sizes["index_files"] == (16 if large else 7)
    storage = CountingStorage()
    manifest = read_manifest(tmp_path, storage)
    assert storage.read_bytes == sizes["root_bytes"]
    assert len(manifest.files) == network.ranks and manifest.files[network.ranks // 2] == files[network.ranks // 2]
    assert storage.read_bytes - sizes["root_bytes"] == manifest.indexes[len(manifest.indexes) // 2].size_bytes
    assert network.plan(tmp_path, network.ranks // 3) == 1
    assert network.plan(tmp_path, 1, network.ranks // 2) <= 6
    pieces = list(manifest.catalogue.pieces_of(5))
    assert [piece.key for piece in pieces] == list(network.keys(5))
    assert pieces[-1].end_bytes == files[5].size_bytes
    assert manifest.chunk_bytes == CHUNK_BYTES
