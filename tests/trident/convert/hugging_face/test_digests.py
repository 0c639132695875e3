"""A file of a model directory that changed or got lost since its checksum was recorded is refused by name."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.errors import ConversionError
from tests.trident.convert.comparison import export
from trident.convert.hugging_face.importing import ModelImportRequest, import_model
from trident.convert.hugging_face.proof import check_digests, file_digests

LISTED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.fixture(scope="module")
def exported(imported_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(imported_model("llama-multi-query-linear"), tmp_path_factory.mktemp("digests") / "model")


def test_an_export_records_its_files_and_more_may_be_added(exported: Path, tmp_path: Path) -> None:
    recorded = json.loads((exported / "proof.json").read_text())["files"]
    assert recorded.keys() == set(LISTED)
    assert recorded["config.json"] == hashlib.sha256((exported / "config.json").read_bytes()).hexdigest()
    folder = shutil.copytree(exported, tmp_path / "model")
    (folder / "README.md").write_text("Mine.")
    import_model(ModelImportRequest(folder, tmp_path / "made"))


@pytest.mark.parametrize("name", LISTED)
def test_a_changed_or_lost_file_is_refused(name: str, exported: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(exported, tmp_path / "model")
    content = bytearray((folder / name).read_bytes())
    content[-3] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(
        ConversionError, match=rf"model/{name} has changed since it was written .*remove the proof.json"
    ):
        import_model(ModelImportRequest(folder, tmp_path / "made"))
    (folder / name).unlink()
    with pytest.raises(ConversionError, match=rf"model/{name} has changed .*, got No such file or directory"):
        import_model(ModelImportRequest(folder, tmp_path / "made"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("proof", [None, {"is_equal": True}, {"files": ["config.json"]}])
def test_without_checksums_nothing_is_compared(tmp_path: Path, proof: object) -> None:
    if proof is not None:
        (tmp_path / "proof.json").write_text(json.dumps(proof))
    check_digests(tmp_path)


def test_weights_in_the_cache_of_the_hub_are_compared_with_their_names(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"weights").hexdigest()
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1f"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / digest)
    (blobs / digest).write_bytes(b"weights")
    check_digests(snapshot)
    assert file_digests(snapshot) == {"model.safetensors": digest}
    (blobs / digest).write_bytes(b"Weights")
    with pytest.raises(ConversionError, match=f"model.safetensors has changed .* SHA-256 {digest}, got [0-9a-f]+"):
        check_digests(snapshot)
