"""A copy of a run holds complete checkpoints only, continues after it was killed, and refuses what is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.checkpoint import verify
from megatron.errors import CheckpointError, ConfigError, DamagedError, StorageError
from megatron.observe.run_copy import CopyPlace, DirectoryPlace, RemotePlace, copy_run
from tests.checkpoint.keeping.checkpoints import save_step
from tests.helpers.machines.fake_ssh import FakeSsh


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints, one that is being written, a lock, and files of its own."""
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


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def published(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(folder).items() if "/." not in name}


@pytest.mark.parametrize("inside", ["", "ckpt", "ckpt/../tb/new"])
def test_a_run_is_not_copied_into_itself(run: Path, inside: str) -> None:
    before = contents(run)
    with pytest.raises(ConfigError, match="is inside .*jolly_noether-26112211, the folder to copy"):
        copy_run(run, DirectoryPlace(run / inside))
    assert contents(run) == before


@pytest.mark.parametrize("kind", ["directory", "remote"])
def test_what_is_complete_is_copied_once(run: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = FakeSsh(tmp_path / "ssh", monkeypatch)
    place: CopyPlace = DirectoryPlace(ssh.home / "there") if kind == "directory" else RemotePlace("host", "there")
    said: list[str] = []
    copied = copy_run(run, place, said.append)
    assert copied.checkpoints == ("ckpt/iter_0000002", "ckpt/iter_0000004")
    assert copied.size_bytes == sum(map(len, published(run).values()))
    there = ssh.home / "there" / run.name
    assert contents(there) == published(run)
    assert verify(there / "ckpt" / "iter_0000004").step == 4
    assert [text for text in said if "left out" in text and "iter_0000005" in text]
    (run / "config.json").write_text('{"changed": true}')
    again = copy_run(run, place)
    assert (again.checkpoints, again.files) == ((), ("config.json",))


def test_a_copy_goes_on_where_it_was_killed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh, place = FakeSsh(tmp_path / "ssh", monkeypatch), RemotePlace("host", "there")
    there = ssh.home / "there" / run.name
    sent = []
    for calls in range(4, 60, 4):
        ssh.breaks_after(calls)
        try:
            copy_run(run, place)
            break
        except StorageError:
            for checkpoint in (there / "ckpt").glob("iter_*"):
                sent.append(verify(checkpoint).step)  # whatever has its name is whole
    else:
        pytest.fail("the copy was never complete")
    assert sent and contents(there) == published(run)
    writes = [call for call in ssh.calls if "pieces_00000.safetensors" in call and "cat >" in call]
    assert len(writes) <= 4, "a file that has arrived is sent again"


def test_damage_is_found_before_the_checkpoint_has_its_name(run: Path, tmp_path: Path) -> None:
    file = run / "ckpt" / "iter_0000004" / "pieces_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(DamagedError, match="pieces_00000.safetensors of .*iter_0000004 does not match its manifest"):
        copy_run(run, DirectoryPlace(tmp_path / "there"))
    there = tmp_path / "there" / run.name / "ckpt"
    assert [path.name for path in there.glob("iter_*")] == ["iter_0000002"]


def test_another_checkpoint_of_the_step_is_not_replaced(run: Path, tmp_path: Path) -> None:
    save_step(tmp_path / "there" / run.name / "ckpt", 2, seed=9)
    with pytest.raises(CheckpointError, match="holds another checkpoint .*iter_0000002"):
        copy_run(run, DirectoryPlace(tmp_path / "there"))


def test_a_run_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path / 'none'} is not a folder"):
        copy_run(tmp_path / "none", DirectoryPlace(tmp_path))
