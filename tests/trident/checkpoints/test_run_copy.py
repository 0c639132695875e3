"""The copy of a run holds complete checkpoints only, and resumes after an interruption."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import pytest

from megatron.checkpoint import verify
from megatron.errors import CheckpointError, ConfigError, DamagedError, StorageError
from tests.checkpoint.retention.checkpoints import OTHER_RUN, loaded_seed, save_step
from tests.helpers.machines.fake_ssh import FakeSsh
from trident.checkpoints.run_copy import CopyTarget, RunCopy, parse_target


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints, one that is being written, a lock, and other files."""
    folder = tmp_path / "jolly_noether-26112211"
    for step in (2, 4):
        save_step(folder / "ckpt", step)
    (folder / "ckpt" / ".tmp-iter_0000006-ab").mkdir()
    (folder / "ckpt" / ".run.lock").write_text("")
    (folder / "ckpt" / "iter_0000005").mkdir()
    (folder / "tb").mkdir()
    (folder / "tb" / "events").write_bytes(b"1")
    (folder / "config.json").write_text("{}")
    return folder


def copy_run(run: Path, target: CopyTarget, report: Callable[[str], None] = print) -> RunCopy:
    copy = RunCopy(run, target, report)
    copy.update()
    return copy


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def published(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(folder).items() if "/." not in name}


@pytest.mark.parametrize("inside", ["", "ckpt", "ckpt/../tb/new"])
def test_a_run_is_not_copied_into_itself(run: Path, inside: str) -> None:
    before = contents(run)
    with pytest.raises(ConfigError, match="is inside .*jolly_noether-26112211, the folder to copy"):
        copy_run(run, parse_target(str(run / inside)))
    assert contents(run) == before


@pytest.mark.parametrize("kind", ["directory", "remote"])
def test_complete_checkpoints_are_copied_once(
    run: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = FakeSsh(tmp_path / "ssh", monkeypatch)
    target = parse_target(str(ssh.home / "there") if kind == "directory" else "host:there")
    lines: list[str] = []
    copied = copy_run(run, target, lines.append)
    assert copied.checkpoints == ["ckpt/iter_0000002", "ckpt/iter_0000004"]
    assert copied.size_bytes == sum(map(len, published(run).values()))
    there = ssh.home / "there" / run.name
    assert contents(there) == published(run)
    assert verify(there / "ckpt" / "iter_0000004").step == 4
    assert [text for text in lines if "skipped" in text and "iter_0000005" in text]
    (run / "config.json").write_text('{"changed": true}')
    again = copy_run(run, target)
    assert (again.checkpoints, again.files) == ([], ["config.json"])


def test_a_killed_copy_resumes(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh, target = FakeSsh(tmp_path / "ssh", monkeypatch), parse_target("host:there")
    there = ssh.home / "there" / run.name
    sent = []
    for calls in range(4, 60, 4):
        ssh.breaks_after(calls)
        try:
            copy_run(run, target)
            break
        except StorageError:
            for checkpoint in (there / "ckpt").glob("iter_*"):
                sent.append(verify(checkpoint).step)  # whatever has its name is whole
    else:
        pytest.fail("the copy was never complete")
    assert sent and contents(there) == published(run)
    writes = [call for call in ssh.calls if "pieces_00000.safetensors" in call and "head -c" in call]
    assert 2 <= len(writes) <= 4, "a file that has arrived is sent again"


def test_damage_is_found_before_the_checkpoint_has_its_name(run: Path, tmp_path: Path) -> None:
    file = run / "ckpt" / "iter_0000002" / "pieces_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(DamagedError, match="pieces_00000.safetensors of .*iter_0000002 does not match its manifest"):
        copy_run(run, parse_target(str(tmp_path / "there")))
    there = tmp_path / "there" / run.name / "ckpt"
    assert [path.name for path in there.glob("iter_*")] == ["iter_0000004"], "later ones are sent"


def test_another_runs_checkpoint_is_not_replaced(run: Path, tmp_path: Path) -> None:
    save_step(tmp_path / "there" / run.name / "ckpt", 2, run_id=OTHER_RUN)
    with pytest.raises(CheckpointError, match="holds .*iter_0000002 of a different run"):
        copy_run(run, parse_target(str(tmp_path / "there")))


def test_a_step_that_is_saved_again_is_copied_again(run: Path, tmp_path: Path) -> None:
    target, there = parse_target(str(tmp_path / "there")), tmp_path / "there" / run.name
    copy_run(run, target)
    save_step(run / "ckpt", 4, seed=9)
    assert copy_run(run, target).checkpoints == ["ckpt/iter_0000004"]
    assert loaded_seed(there / "ckpt") == 9 and contents(there) == published(run)


@pytest.mark.parametrize("again", [None, 9], ids=["deleted", "saved again"])
def test_a_checkpoint_that_is_deleted_during_the_copy_is_skipped(
    run: Path, again: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, there, write = parse_target(str(tmp_path / "there")), tmp_path / "there" / run.name, CopyTarget.write

    def overtaken(target: CopyTarget, path: PurePosixPath, source: BinaryIO, size_bytes: int) -> str:
        if path.parent.name.startswith(".tmp-iter_0000002"):
            monkeypatch.undo()
            shutil.rmtree(run / "ckpt" / "iter_0000002")
            if again is not None:
                save_step(run / "ckpt", 2, seed=again)
        return write(target, path, source, size_bytes)

    monkeypatch.setattr(CopyTarget, "write", overtaken)
    lines: list[str] = []
    assert copy_run(run, target, lines.append).checkpoints == ["ckpt/iter_0000004"]
    assert [text for text in lines if "iter_0000002: the run has deleted or replaced it meanwhile" in text]
    assert not list(there.glob("ckpt/.*")), "nothing is left of it"
    copy_run(run, target)
    assert contents(there) == published(run)


def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "log.txt").open("wb") as stream:
        stream.truncate(64 << 20)
    tracemalloc.start()
    try:
        assert copy_run(tmp_path / "run", parse_target(str(tmp_path / "there"))).size_bytes == 64 << 20
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_run_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path / 'none'} is not a folder"):
        copy_run(tmp_path / "none", parse_target(str(tmp_path)))
