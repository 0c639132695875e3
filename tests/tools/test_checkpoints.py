"""The program that lists, verifies, deletes and copies checkpoints, as a user calls it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.checkpoint import CheckpointLock, verify
from megatron.checkpoint.storage import DISK, Storage, write_file
from megatron.errors import CheckpointError, ConfigError, LaunchError, StorageError
from megatron.train.restarts.identity import RunIdentity, read_identity, write_identity
from tests.checkpoint.made.fake_pieces import make_state
from tests.checkpoint.made.stored import save_checkpoint
from tests.checkpoint.retention.checkpoints import MESH, OTHER_RUN, RUN, hidden, save_step, steps
from tools import checkpoints


def damage(folder: Path) -> None:
    """Changes a bit of a tensor."""
    file = folder / "pieces_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 8
    file.write_bytes(content)


def test_a_folder_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parallel = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4, "data_parallel_size": 8}
    config = {"parallel": parallel}
    save_checkpoint(tmp_path, make_state(), 100, run_id=RUN, validation_loss=2.25, config=config)
    save_step(tmp_path, 7)
    (tmp_path / "iter_0000007" / "manifest.json").write_text("{}")
    (tmp_path / ".tmp-iter_0000101-0a").mkdir()
    capsys.readouterr()
    assert checkpoints.main(["list", str(tmp_path)]) == 0
    heading, _, *rows, problem = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in row.split("|")] for row in (heading, *rows)]
    assert cells[0] == ["checkpoint", "state", "layout", "run", "step", "size", "validation loss"]
    assert cells[1] == [".tmp-iter_0000101-0a", "unfinished", "", "", "101", "0 bytes", ""]
    assert cells[2][:5] == ["iter_0000100", "complete", "tp 2 pp 4 dp 8", RUN[:8], "100"]
    assert cells[2][5].endswith(" KB") and cells[2][6] == "2.25"
    assert cells[3][:5] == ["iter_0000007", "damaged", "", "", "7"]
    assert problem.startswith("iter_0000007: ") and "manifest.json is damaged" in problem
    assert checkpoints.main(["list", "--load", str(tmp_path), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [entry["state"] for entry in value["checkpoints"]] == ["unfinished", "complete", "damaged"]
    assert value["checkpoints"][1]["layout"] == {"tp": 2, "pp": 4, "dp": 8}


def test_folders_without_checkpoints_are_distinguished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoints.main(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} holds no checkpoint\n"
    (tmp_path / "global_step10\x1b[31m").mkdir()
    with pytest.raises(CheckpointError, match=r"files that look like another's: 'global_step10\\x1b\[31m'"):
        checkpoints.main(["list", str(tmp_path)])
    with pytest.raises(StorageError, match=r"cannot list .*nowhere: No such file"):
        checkpoints.main(["list", str(tmp_path / "nowhere")])
    for words in (["verify"], ["prune", "--keep-last", "1"], ["copy", "--save", str(tmp_path / "copies")]):
        with pytest.raises(CheckpointError, match=r"no checkpoint in .*nowhere. Use the folder of a run"):
            checkpoints.main([words[0], "--load", str(tmp_path / "nowhere"), *words[1:]])
    assert not (tmp_path / "nowhere").exists() and not (tmp_path / "copies").exists()


def test_every_byte_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    damage(tmp_path / "iter_0000002")
    capsys.readouterr()
    assert checkpoints.main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/iter_0000003 is valid: verified all 1 files (")
    assert checkpoints.main(["verify", str(tmp_path / "iter_0000001")]) == 0
    assert checkpoints.main(["verify", str(tmp_path), "--steps", "3", "1"]) == 0
    capsys.readouterr()
    assert checkpoints.main(["verify", str(tmp_path), "--all"]) == 74
    output = capsys.readouterr()
    assert output.out.count(" is valid: ") == 2
    told = rf"error: {tmp_path}/iter_0000002/pieces_00000.safetensors is damaged between bytes \d+ and \d+"
    assert re.search(told, output.err)
    assert checkpoints.main(["verify", str(tmp_path), "--steps", "2"]) == 74
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 4, 5. It has these steps: 1, 2, 3\."):
        checkpoints.main(["verify", str(tmp_path), "--steps", "4", "1", "5"])
    with pytest.raises(ConfigError, match="--all cannot be combined with --steps"):
        checkpoints.main(["verify", str(tmp_path), "--all", "--steps", "1"])


def test_what_need_not_be_kept_is_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(1, 8):
        save_step(tmp_path, step, loss=abs(step - 3.2))
    save_step(tmp_path, 9, run_id=OTHER_RUN)
    write_identity(tmp_path, RunIdentity(RUN))
    (tmp_path / ".tmp-iter_0000008-0a").mkdir()
    (tmp_path / "iter_0000001").rename(tmp_path / ".old-iter_0000001-0a")
    words = ["prune", str(tmp_path), "--keep-last", "2", "--keep-every", "4", "--keep-best"]
    capsys.readouterr()
    assert checkpoints.main([*words, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert told.count("would delete ") == 2 and f"would delete {tmp_path}/iter_0000005 (" in told
    assert f"would clean up {tmp_path}/.tmp-iter_0000008-0a (unfinished)" in told
    assert steps(tmp_path) == [2, 3, 4, 5, 6, 7, 9] and len(hidden(tmp_path)) == 2
    assert checkpoints.main(words) == 0
    output = capsys.readouterr()
    assert output.out.count("deleted ") == 3  # the one that a dead save had moved aside, too
    assert f"iter_0000009 belongs to another run ({OTHER_RUN}) and is not deleted" in output.err
    assert steps(tmp_path) == [3, 4, 6, 7, 9] and not hidden(tmp_path)
    assert checkpoints.main(words) == 0
    assert capsys.readouterr().out == "every checkpoint is kept\n"


def test_the_checkpoints_of_other_branches_are_not_deleted(tmp_path: Path) -> None:
    for step, run_id in enumerate([OTHER_RUN, OTHER_RUN, "", *[RUN] * 5]):  # before the fork, an import, the fork
        save_step(tmp_path, step, run_id=run_id)
    assert checkpoints.main(["prune", str(tmp_path), "--keep-last", "1"]) == 0
    assert steps(tmp_path) == [0, 1, 2, 7]
    for step in (8, 9):
        save_step(tmp_path / "imports", step, run_id="")
    assert checkpoints.main(["prune", str(tmp_path / "imports"), "--keep-last", "1"]) == 0
    assert steps(tmp_path / "imports") == [9]
    save_step(tmp_path, 8, run_id=OTHER_RUN)
    with pytest.raises(CheckpointError, match=rf"iter_0000008 of run {OTHER_RUN}, iter_0000007 of run {RUN}"):
        checkpoints.main(["prune", str(tmp_path), "--keep-last", "1"])
    assert steps(tmp_path) == [0, 1, 2, 7, 8]


def test_nothing_is_deleted_for_a_newest_one_that_is_damaged(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    damage(tmp_path / "iter_0000003")
    assert checkpoints.main(["prune", str(tmp_path), "--keep-last", "1"]) == 0
    assert steps(tmp_path) == [2, 3]
    damage(tmp_path / "iter_0000002")
    with pytest.raises(CheckpointError, match="no complete checkpoint of this run in .*, so none is deleted"):
        checkpoints.main(["prune", str(tmp_path), "--keep-last", "1"])
    with pytest.raises(CheckpointError, match=r"iter_0000002 is a checkpoint. Give the folder that contains it"):
        checkpoints.main(["prune", str(tmp_path / "iter_0000002"), "--keep-last", "1"])
    assert steps(tmp_path) == [2, 3]


def test_a_failed_deletion_shows_in_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Storage, source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    for step in (1, 2):
        save_step(tmp_path, step)
    monkeypatch.setattr(Storage, "rename", refuse)
    assert checkpoints.main(["prune", str(tmp_path), "--keep-last", "1"]) == 74
    assert steps(tmp_path) == [1, 2]


def test_the_folder_of_a_living_run_is_left_alone(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path, step)
    source = save_step(tmp_path / "other", 3)
    with CheckpointLock(tmp_path, MESH):
        with pytest.raises(LaunchError, match=r"nothing was deleted: .* is in use by run \w+ \(process \d+ on host"):
            checkpoints.main(["prune", str(tmp_path), "--keep-last", "1"])
        with pytest.raises(LaunchError, match=r"nothing was copied: .* is in use by run"):
            checkpoints.main(["copy", str(source), str(tmp_path)])
        assert checkpoints.main(["prune", str(tmp_path), "--keep-last", "1", "--dry-run"]) == 0
    assert steps(tmp_path) == [1, 2]


def test_a_checkpoint_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "run", tmp_path / "copies"
    for step in (1, 2, 3):
        save_step(source, step)
    base = {"run_id": OTHER_RUN, "step": 7, "fingerprint": "0" * 64}
    write_identity(source, RunIdentity(RUN, base))
    capsys.readouterr()
    assert checkpoints.main(["copy", str(source), str(target)]) == 0
    assert capsys.readouterr().out == f"copied {source}/iter_0000003 to {target}/iter_0000003\n"
    assert read_identity(target) == read_identity(source)
    assert checkpoints.main(["copy", str(source), str(target)]) == 0
    assert capsys.readouterr().out == f"{source}/iter_0000003 is in {target} already\n"
    assert checkpoints.main(["copy", "--step", "1", "--save", str(target), "--load", str(source)]) == 0
    assert steps(target) == [1, 3] and not hidden(target)
    assert verify(target / "iter_0000001").step == 1
    assert (target / "iter_0000003" / "manifest.json").read_bytes() == (
        source / "iter_0000003" / "manifest.json"
    ).read_bytes()


def test_a_copy_to_a_store_locks_no_local_folder_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    source, address = save_step(tmp_path / "run", 3), "memory://copies-by-hand/run"
    monkeypatch.chdir(tmp_path)
    write_file(DISK, Path(address) / "iter_0000003" / "pieces_00000.safetensors", b"of a copy that died")
    assert checkpoints.main(["copy", str(source), address]) == 0
    assert verify(Path(address) / "iter_0000003").step == 3
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_copy_replaces_and_mixes_nothing(tmp_path: Path) -> None:
    source, target = save_step(tmp_path / "run", 3), tmp_path / "copies"
    there = save_step(target, 3, seed=9)
    with pytest.raises(CheckpointError, match=f"{there} is a different checkpoint of step 3"):
        checkpoints.main(["copy", str(source), str(target)])
    save_step(tmp_path / "foreign", 5, run_id=OTHER_RUN)
    with pytest.raises(CheckpointError, match=f"holds checkpoints of run {OTHER_RUN}, but .*0003 is of run {RUN}: "):
        checkpoints.main(["copy", str(source), str(tmp_path / "foreign")])
    damage(source)
    with pytest.raises(CheckpointError, match=r"pieces_00000.safetensors is damaged between bytes \d+ and \d+"):
        checkpoints.main(["copy", str(source), str(tmp_path / "new")])
    assert steps(tmp_path / "new") == [] and steps(tmp_path / "foreign") == [5]
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 8. It has these steps: 3\."):
        checkpoints.main(["copy", str(tmp_path / "run"), str(target), "--step", "8"])


def test_wrong_words_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"unknown command 'remove\\x1b'. Use one of: list, inspect, verify"):
        checkpoints.main(["remove\x1b"])
    with pytest.raises(ConfigError, match="unknown command ''"):
        checkpoints.main([])
    with pytest.raises(ConfigError, match="--keep-last is required"):
        checkpoints.main(["prune", str(tmp_path)])
    with pytest.raises(ConfigError, match="--keep-last"):
        checkpoints.main(["prune", str(tmp_path), "--keep-last", "0"])
    with pytest.raises(ConfigError, match="--save is required"):
        checkpoints.main(["copy", str(tmp_path)])
    with pytest.raises(ConfigError, match="third"):
        checkpoints.main(["copy", str(tmp_path), str(tmp_path), "third"])
    assert checkpoints.main(["--help"]) == 0
    assert "Commands: list, inspect, verify, copy, average, prune; each has --help." in capsys.readouterr().out


def test_the_best_checkpoint_is_named_where_it_is_not_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path, make_state(), 100, run_id=RUN, validation_loss=2.25)
    said = f"lowest validation loss: iter_0000100 (--load {tmp_path / 'iter_0000100'})\n"
    for step, loss, is_named in ((200, 2.5, True), (300, None, True), (400, 2.0, False)):
        save_checkpoint(tmp_path, make_state(), step, run_id=RUN, validation_loss=loss)
        capsys.readouterr()
        assert checkpoints.main(["list", str(tmp_path)]) == 0
        assert capsys.readouterr().out.endswith(said) == is_named
