"""tools/runs/sync_run.py: what it says, and that it goes on through failures when it copies again and again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron.errors import ConfigError, StorageError
from tests.checkpoint.retention.checkpoints import save_step
from tests.helpers.machines.fake_ssh import FakeSsh
from tools.runs import sync_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_turn_that_fails_is_followed_by_another(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ssh = FakeSsh(tmp_path / "ssh", monkeypatch)
    ssh.breaks_after(0)
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        ssh.breaks_after(None if len(pauses) == 1 else 99)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", pause)
    with pytest.raises(KeyboardInterrupt):
        sync_run.main([str(run), "--to", "host:there", "--every-seconds", "60"])
    printed = capfd.readouterr()
    assert pauses == [60, 60] and "Retrying in the next round." in printed.err
    assert printed.out == "host:there: sent 0 checkpoints and 1 other files, 2 bytes\n"
    assert (ssh.home / "there" / "run" / "config.json").read_text() == "{}"


def test_a_damaged_checkpoint_does_not_end_the_turns(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = save_step(run, 2) / "pieces_00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"?")

    def pause(seconds: float) -> None:
        if file.read_bytes() == content:
            raise KeyboardInterrupt
        file.write_bytes(content)

    monkeypatch.setattr(time, "sleep", pause)
    with pytest.raises(KeyboardInterrupt):
        sync_run.main([str(run), "--to", str(tmp_path / "there"), "--every-seconds", "60"])
    assert "does not match its manifest" in capfd.readouterr().err
    assert (tmp_path / "there" / "run" / "iter_0000002" / "pieces_00000.safetensors").read_bytes() == content


def test_a_single_turn_that_fails_is_an_error(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSsh(tmp_path / "ssh", monkeypatch).breaks_after(0)
    with pytest.raises(StorageError, match="ssh exited with code 255"):
        sync_run.main([str(run), "--to", "host:there"])
    with pytest.raises(ConfigError, match="--to is required"):
        sync_run.main([str(run)])
