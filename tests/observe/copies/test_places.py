"""Both places: files get there whole, by names that a shell cannot misread, and failures say what to do."""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath

import pytest

from megatron.errors import ConfigError, StorageError
from megatron.observe.run_copy import CopyPlace, DirectoryPlace, RemotePlace, place_of
from tests.helpers.machines.fake_ssh import FakeSsh

ODD = "it's $HOME; `id` && *\nend"
CONTENT = b"\0\xff" + b"bytes" * 100


@pytest.fixture(params=["directory", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CopyPlace:
    if request.param == "directory":
        return DirectoryPlace(tmp_path / "there")
    FakeSsh(tmp_path / "ssh", monkeypatch)
    return RemotePlace("user@host", "there")


def test_files_are_written_compared_and_renamed(place: CopyPlace) -> None:
    folder = PurePosixPath("a b")
    assert place.digests(folder, ("x", "y")) == {}
    place.write(folder / "x.partial", CONTENT)
    place.rename(folder / "x.partial", folder / "x", replaces=True)
    assert place.digests(folder, ("x", "x.partial")) == {"x": hashlib.sha256(CONTENT).hexdigest()}
    place.rename(folder, PurePosixPath("final"), replaces=False)
    assert list(place.digests(PurePosixPath("final"), ("x",))) == ["x"]
    place.write(folder / "x", b"")
    with pytest.raises(StorageError, match="cannot be made"):
        place.rename(folder, PurePosixPath("final"), replaces=False)


def test_names_are_not_read_by_a_shell(place: CopyPlace) -> None:
    odd = PurePosixPath(ODD.replace("\n", " "))
    place.write(odd / "-rf", CONTENT)
    assert list(place.digests(odd, ("-rf",))) == ["-rf"]


def test_a_place_is_a_directory_or_a_path_of_a_machine(tmp_path: Path) -> None:
    for text in ("logs", "./a:b", "/mnt/a:b", "~", "."):
        assert isinstance(place_of(text), DirectoryPlace), text
    for text, host, path in (
        ("ubuntu@192.0.2.7:runs", "ubuntu@192.0.2.7", "runs"),
        ("gpu-box:/mnt/a b", "gpu-box", "/mnt/a b"),
        ("[2001:db8::7]:x", "[2001:db8::7]", "x"),
    ):
        place = place_of(text)
        assert isinstance(place, RemotePlace) and (place.host, str(place.root)) == (host, path)
    with pytest.raises(ConfigError, match="--to s3://bucket/x is an address of another kind"):
        place_of("s3://bucket/x")
    with pytest.raises(ConfigError, match="--to -oProxyCommand=touch x:y begins like an option"):
        place_of("-oProxyCommand=touch x:y")
    with pytest.raises(ConfigError, match="-oProxyCommand would be an option of ssh"):
        place_of("-oProxyCommand:x")


def test_ssh_is_never_asked_for_a_password_and_its_failure_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = FakeSsh(tmp_path, monkeypatch)
    place = RemotePlace("host", "there")
    place.write(PurePosixPath("x"), b"1")
    assert ssh.calls[0].startswith("-o BatchMode=yes -o ConnectTimeout=20 -- host mkdir -p")
    ssh.breaks_after(0)
    with pytest.raises(StorageError, match=r"host:there .* ssh ended with 255 \(Connection closed by remote host\)"):
        place.write(PurePosixPath("x"), b"1")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(StorageError, match="ssh cannot be used: No such file"):
        place.digests(PurePosixPath("."), ("x",))


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=rf"the copy in {tmp_path / 'file'} .* cannot be made"):
        DirectoryPlace(tmp_path / "file").write(PurePosixPath("x"), b"")
