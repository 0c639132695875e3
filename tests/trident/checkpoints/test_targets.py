"""Both places: files get there whole, by names that a shell cannot misread, and failures report what to do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import pytest

from megatron.errors import ConfigError, StorageError
from tests.helpers.machines.fake_ssh import FakeSsh
from trident.checkpoints.run_copy import CopyTarget, parse_target

ODD = "it's $HOME; `id` && *\nend"
CONTENT = b"\0\xff" + b"bytes" * 100


@pytest.fixture(params=["directory", "remote"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CopyTarget:
    if request.param == "directory":
        return CopyTarget(PurePosixPath(tmp_path / "there"))
    FakeSsh(tmp_path / "ssh", monkeypatch)
    return CopyTarget(PurePosixPath("there"), "user@host")


@pytest.fixture
def source(tmp_path: Path) -> Iterator[BinaryIO]:
    """A file that has grown beyond the bytes to send."""
    (tmp_path / "source").write_bytes(CONTENT + b"appended meanwhile")
    with (tmp_path / "source").open("rb", buffering=0) as stream:
        yield stream


def test_files_are_written_compared_and_renamed(target: CopyTarget, source: BinaryIO) -> None:
    folder, final, digest = PurePosixPath("a b"), PurePosixPath("final"), hashlib.sha256(CONTENT).hexdigest()
    assert target.digests(folder, ("x", "y")) == {}
    assert target.write(folder / "x.partial", source, len(CONTENT)) == digest
    target.rename(folder / "x.partial", folder / "x", replaces=True)
    assert target.digests(folder, ("x", "x.partial")) == {"x": digest}
    target.rename(folder, final, replaces=False)
    assert target.digests(final, ("x",)) == {"x": digest}
    target.write(folder / "y", source, 8)
    with pytest.raises(StorageError, match=r"copying to .* failed"):
        target.rename(folder, final, replaces=False)
    target.rename(folder, final, replaces=True)
    assert list(target.digests(final, ("x", "y"))) == ["y"] and target.read(final / "y") == "appended"


def test_names_are_not_read_by_a_shell(target: CopyTarget, source: BinaryIO) -> None:
    odd = PurePosixPath(ODD.replace("\n", " "))
    target.write(odd / "-rf", source, len(CONTENT))
    assert list(target.digests(odd, ("-rf",))) == ["-rf"]


def test_only_what_a_killed_copy_left_is_swept(target: CopyTarget, source: BinaryIO) -> None:
    run, save = PurePosixPath("run"), ".tmp-iter_0000002-0123456789abcdef"
    for name in (
        ".config.json.partial",
        f"ckpt/.tmp-iter_0000002-{'a' * 64}/x",
        f"ckpt/{save}/x",
        "ckpt/iter_0000002/x",
    ):
        target.write(run / name, source, 1)
    target.sweep(run)
    assert target.digests(run, (".config.json.partial",)) == {}
    assert target.digests(run / "ckpt" / f".tmp-iter_0000002-{'a' * 64}", ("x",)) == {}
    assert list(target.digests(run / "ckpt", (f"{save}/x", "iter_0000002/x"))) == [f"{save}/x", "iter_0000002/x"]


def test_a_target_is_a_directory_or_a_path_on_a_host(tmp_path: Path) -> None:
    for text in ("logs", "./a:b", "/mnt/a:b", "~", "."):
        assert parse_target(text).host is None, text
    for text, host, path in (
        ("ubuntu@192.0.2.7:runs", "ubuntu@192.0.2.7", "runs"),
        ("gpu-box:/mnt/a b", "gpu-box", "/mnt/a b"),
        ("[2001:db8::7]:x", "[2001:db8::7]", "x"),
    ):
        assert parse_target(text) == CopyTarget(PurePosixPath(path), host)
    with pytest.raises(ConfigError, match="--to s3://bucket/x is a URL"):
        parse_target("s3://bucket/x")
    with pytest.raises(ConfigError, match="--to -oProxyCommand=touch x:y starts like an option"):
        parse_target("-oProxyCommand=touch x:y")
    with pytest.raises(ConfigError, match="-oProxyCommand would be an option of ssh"):
        parse_target("-oProxyCommand:x")


def test_ssh_runs_in_batch_mode_and_its_failure_is_shown(
    source: BinaryIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = FakeSsh(tmp_path, monkeypatch)
    target = parse_target("host:there")
    target.write(PurePosixPath("x"), source, 1)
    assert ssh.calls[0].startswith("-o BatchMode=yes -o ConnectTimeout=20 -- host mkdir -p")
    ssh.breaks_after(0)
    with pytest.raises(
        StorageError, match=r"host:there .* ssh exited with code 255 \(Connection closed by remote host\)"
    ):
        target.write(PurePosixPath("x"), source, 1)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(StorageError, match="ssh cannot be used: No such file"):
        target.digests(PurePosixPath("."), ("x",))


def test_a_directory_that_cannot_be_written_is_named(source: BinaryIO, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=rf"copying to {tmp_path / 'file'} .* failed: sh exited with code 1 \(mk"):
        parse_target(str(tmp_path / "file")).write(PurePosixPath("x"), source, 1)
