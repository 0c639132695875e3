"""Which run a folder belongs to: by its file, by its checkpoints, or by neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import save
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.record import Record
from megatron.checkpoint.recovery import IDENTITY_NAME, only_of_run
from megatron.errors import CheckpointError, DamagedError
from megatron.parallel.mesh import ParallelMesh
from megatron.train.restarts.identity import (
    RunIdentity,
    base_of,
    base_text,
    identity_of,
    is_same_base,
    read_identity,
    write_identity,
)
from tests.checkpoint.made.fake_pieces import make_state, whole_sink
from tests.checkpoint.made.records import make_record

MESH = ParallelMesh.single()
ONE, TWO = "1" * 16, "2" * 16


def saved(folder: Path, step: int, run_id: str = "", *, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint of a run in a folder; returns its own folder."""
    record = make_record(step, run_id=run_id, **changes).to_json()
    return save(folder, step, whole_sink(make_state(seed=seed)).expected, record, MESH)


def test_an_identity_is_written_and_read_back(tmp_path: Path) -> None:
    identity = RunIdentity.new({"run_id": TWO, "step": 3, "fingerprint": "a" * 64})
    assert identity != RunIdentity.new(identity.finetuned_from)
    write_identity(tmp_path / "new", identity)
    assert read_identity(tmp_path / "new") == identity_of(tmp_path / "new") == identity
    write_identity(tmp_path / "new", RunIdentity(ONE))
    assert read_identity(tmp_path / "new") == RunIdentity(ONE)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [IDENTITY_NAME]


def test_a_missing_file_is_replaced_by_what_the_checkpoints_say(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    saved(tmp_path, 6, ONE)
    saved(tmp_path, 8, ONE)
    assert identity_of(tmp_path) == RunIdentity(ONE)
    (tmp_path / "iter_0000006" / "manifest.json").write_text("damaged")
    assert identity_of(tmp_path) == RunIdentity(ONE)
    saved(tmp_path, 7, TWO)
    sentence = (
        rf"several runs and no run\.json .* iter_0000008 of run {ONE}, iter_0000007 of run {TWO}\. Move the other"
    )
    with pytest.raises(CheckpointError, match=sentence):
        identity_of(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be read"),
        (b"\xff{", "cannot be read"),
        (b"[" * 60_000, "cannot be read"),
        (b"{}" + b" " * 100_000, "names no run"),
        (json.dumps({"run_id": "\x1b[2J"}).encode(), "names no run"),
        (json.dumps([ONE]).encode(), "names no run"),
    ],
)
def test_a_damaged_file_is_as_good_as_none(
    tmp_path: Path, content: bytes, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 4, ONE)
    (tmp_path / IDENTITY_NAME).write_bytes(content)
    assert identity_of(tmp_path) == RunIdentity(ONE)
    assert f"{tmp_path / IDENTITY_NAME} {reason}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / IDENTITY_NAME).mkdir()
    (tmp_path / IDENTITY_NAME / "x").touch()
    write_identity(tmp_path, RunIdentity(ONE))
    assert f"{tmp_path / IDENTITY_NAME} cannot be written" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 1


def test_only_checkpoints_of_the_run_pass() -> None:
    check = only_of_run(ONE, Path("c"))
    check(Path("c/iter_0000004"), {"run_id": ONE})
    check(Path("c/iter_0000004"), {})
    only_of_run("", Path("c"))(Path("c/iter_0000004"), {"run_id": TWO})
    sentence = rf"it belongs to run {TWO}, but c to run {ONE}\. .*--load c/iter_0000004 and another --save"
    with pytest.raises(DamagedError, match=sentence):
        check(Path("c/iter_0000004"), {"run_id": TWO})


def base(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    return base_of(Record.from_json(manifest.record, folder), manifest)


def test_a_base_is_known_by_its_run_or_by_its_tensors(tmp_path: Path) -> None:
    named = base(saved(tmp_path / "a", 4, ONE))
    assert (named["run_id"], named["step"]) == (ONE, 4)
    later = base(saved(tmp_path / "a", 6, ONE, seed=1))
    assert is_same_base(named, base(saved(tmp_path / "b", 4, ONE)))
    assert not is_same_base(named, later)
    assert is_same_base(named, later, at_any_step=True)
    assert not is_same_base(named, base(saved(tmp_path / "c", 4, TWO)), at_any_step=True)
    nameless = base(saved(tmp_path / "d", 0))
    assert is_same_base(nameless, base(saved(tmp_path / "e", 0))), "two imports of one model"
    assert not is_same_base(nameless, base(saved(tmp_path / "f", 0, seed=1)), at_any_step=True)
    assert not is_same_base({}, {}) and not is_same_base({}, named)
    assert base_text(named) == f"run {ONE} at iteration 4"
    assert base_text(nameless) == f"the weights {nameless['fingerprint'][:12]}"
    assert str(RunIdentity(TWO, named)) == f"run {TWO}, a fine-tuning of run {ONE} at iteration 4"
    assert str(RunIdentity()) == "a run of an older version, without identity"
