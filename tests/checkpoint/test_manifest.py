"""The manifest: what a checkpoint folder holds, and which manifest is parsed again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from megatron.checkpoint import read_record, verify
from megatron.checkpoint.manifest import folder_step, read_manifest
from megatron.errors import DamagedError
from tests.checkpoint.made.saved_state import RECORD, CountingStorage, save_state


def test_a_checkpoint_contains_only_safetensors_and_a_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_state(tmp_path / "new" / "run", 7)
    assert path == tmp_path / "new" / "run" / "iter_0000007"
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "pieces_00000.safetensors"]
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "iter_0000007",
        "latest_checkpointed_iteration.txt",
    ]
    assert (path.parent / "latest_checkpointed_iteration.txt").read_bytes() == b"7"
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format_version"] == 2
    assert manifest["step"] == 7
    assert manifest["record"] == RECORD == read_record(path)
    content = (path / "pieces_00000.safetensors").read_bytes()
    name, size, digest, chunks = manifest["files"][0]
    assert (name, size, digest) == ("pieces_00000.safetensors", len(content), hashlib.sha256(content).hexdigest())
    assert chunks == [hashlib.sha256(content[at : at + 256]).hexdigest() for at in range(0, size, 256)]
    output = capsys.readouterr().out
    assert f"saving checkpoint at iteration       7 to {path.parent}" in output
    assert f"successfully saved checkpoint at iteration       7 to {path.parent}" in output
    assert verify(path).step == 7


def test_a_known_manifest_is_read_but_not_parsed_again(tmp_path: Path) -> None:
    path = save_state(tmp_path, 3)
    known = read_manifest(path)
    storage = CountingStorage()
    assert read_manifest(path, storage, known) is known
    assert storage.read_bytes == (path / "manifest.json").stat().st_size
    other = read_manifest(save_state(tmp_path, 4))
    again = read_manifest(path, known=other)
    assert again.digest == known.digest and again is not known
    text = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(text.replace(b'"step": 3', b'"step": 4', 1))
    with pytest.raises(DamagedError, match=f"its content does not match digest {known.digest}"):
        read_manifest(path, known=known)
    moved = path.rename(tmp_path / "iter_0000009")
    (moved / "manifest.json").write_bytes(text)
    with pytest.raises(DamagedError, match="is for step 3, but its folder is for step 9"):
        read_manifest(moved, known=known)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("iter_0000012", 12),
        (".old-iter_0000012-0af", 12),
        ("iter_123456789", 123456789),
        ("iter_12", None),
        (".tmp-iter_0000012-0af", None),
        ("iter_0000012.bak", None),
    ],
)
def test_the_step_is_in_the_folders_name(name: str, step: int | None) -> None:
    assert folder_step(name) == step
