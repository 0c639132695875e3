"""Both places: files get there whole, by names that a shell cannot misread, and failures say what to do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import pytest

from megatron.errors import ConfigError, StorageError
from tests.helpers.machines.fake_ssh import FakeSsh
from trident.checkpoints.run_copy import CopyPlace, place_of

ODD = "it's $HOME; `id` && *\nend"
CONTENT = b"\0\xff" + b"bytes" * 100


@pytest.fixture(params=["directory", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CopyPlace:
    if request.param == "directory":
        return CopyPlace(PurePosixPath(tmp_path / "there"))
    FakeSsh(tmp_path / "ssh", monkeypatch)
    return CopyPlace(PurePosixPath("there"), "user@host")


@pytest.fixture
def source(tmp_path: Path) -> Iterator[BinaryIO]:
    """A file to send, which is larger than what is to be sent of it."""
    (tmp_path / "source").write_bytes(CONTENT + b"appended meanwhile")
    with (tmp_path / "source").open("rb", buffering=0) as stream:
        yield stream


def test_files_are_written_compared_and_renamed(place: CopyPlace, source: BinaryIO) -> None:
    folder, final, digest = PurePosixPath("a b"), PurePosixPath("final"), hashlib.sha256(CONTENT).hexdigest()
    assert place.digests(folder, ("x", "y")) == {}
    assert place.write(folder / "x.partial", source, len(CONTENT)) == digest
    place.rename(folder / "x.partial", folder / "x", replaces=True)
    assert place.digests(folder, ("x", "x.partial")) == {"x": digest}
    place.rename(folder, final, replaces=False)
    assert place.digests(final, ("x",)) == {"x": digest}
    place.write(folder / "y", source, 8)
    with pytest.raises(StorageError, match="cannot be made"):
        place.rename(folder, final, replaces=False)
    place.rename(folder, final, replaces=True)
    assert list(place.digests(final, ("x", "y"))) == ["y"] and place.read(final / "y") == "appended"


def test_names_are_not_read_by_a_shell(place: CopyPlace, source: BinaryIO) -> None:
    odd = PurePosixPath(ODD.replace("\n", " "))
    place.write(odd / "-rf", source, len(CONTENT))
    assert list(place.digests(odd, ("-rf",))) == ["-rf"]


def test_only_what_a_killed_copy_left_is_swept(place: CopyPlace, source: BinaryIO) -> None:
    run, save = PurePosixPath("run"), ".tmp-iter_0000002-0123456789abcdef"
    for name in (
        ".config.json.partial",
        f"ckpt/.tmp-iter_0000002-{'a' * 64}/x",
        f"ckpt/{save}/x",
        "ckpt/iter_0000002/x",
    ):
        place.write(run / name, source, 1)
    place.sweep(run)
    assert place.digests(run, (".config.json.partial",)) == {}
    assert place.digests(run / "ckpt" / f".tmp-iter_0000002-{'a' * 64}", ("x",)) == {}
    assert list(place.digests(run / "ckpt", (f"{save}/x", "iter_0000002/x"))) == [f"{save}/x", "iter_0000002/x"]


def test_a_place_is_a_directory_or_a_path_of_a_machine(tmp_path: Path) -> None:
    for text in ("logs", "./a:b", "/mnt/a:b", "~", "."):
        assert place_of(text).host is None, text
    for text, host, path in (
        ("ubuntu@192.0.2.7:runs", "ubuntu@192.0.2.7", "runs"),
        ("gpu-box:/mnt/a b", "gpu-box", "/mnt/a b"),
        ("[2001:db8::7]:x", "[2001:db8::7]", "x"),
    ):
        assert place_of(text) == CopyPlace(PurePosixPath(path), host)
    with pytest.raises(ConfigError, match="--to s3://bucket/x is an address of another kind"):
        place_of("s3://bucket/x")
    with pytest.raises(ConfigError, match="--to -oProxyCommand=touch x:y begins like an option"):
        place_of("-oProxyCommand=touch x:y")
    with pytest.raises(ConfigError, match="-oProxyCommand would be an option of ssh"):
        place_of("-oProxyCommand:x")


def test_ssh_is_never_asked_for_a_password_and_its_failure_is_shown(
    source: BinaryIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = FakeSsh(tmp_path, monkeypatch)
    place = place_of("host:there")
    place.write(PurePosixPath("x"), source, 1)
    assert ssh.calls[0].startswith("-o BatchMode=yes -o ConnectTimeout=20 -- host mkdir -p")
    ssh.breaks_after(0)
    with pytest.raises(StorageError, match=r"host:there .* ssh ended with 255 \(Connection closed by remote host\)"):
        place.write(PurePosixPath("x"), source, 1)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(StorageError, match="ssh cannot be used: No such file"):
        place.digests(PurePosixPath("."), ("x",))


def test_a_directory_that_cannot_be_written_is_named(source: BinaryIO, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=rf"the copy in {tmp_path / 'file'} .* cannot be made: sh ended with 1 \(mk"):
        place_of(str(tmp_path / "file")).write(PurePosixPath("x"), source, 1)
