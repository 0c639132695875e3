"""Opening files: only plain files and pipes of the shell, at once, and no more than they may hold."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from megatron.files.plain import (
    check_plain,
    open_plain,
    open_stream,
    parse_json,
    read_plain,
    read_plain_json,
    read_plain_text,
    sha256_of,
)


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder", "loop", "missing"])
def test_what_is_no_plain_file_is_refused_in_true_words(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    words = f"it is a {kind}, not a regular file"
    with socket.socket(socket.AF_UNIX) as bound:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "socket":
            bound.bind(str(path))
            words = "No such device or address"
        elif kind == "folder":
            path.mkdir()
        elif kind == "loop":
            path.symlink_to(path)
            words = "Too many levels of symbolic links"
        else:
            words = "No such file or directory"
        for read in (open_plain, open_stream, check_plain, read_plain, read_plain_text):
            with pytest.raises(OSError, match=words):
                read(path)


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one\r\ntwo\n")
    assert read_plain(path) == b"one\r\ntwo\n" and read_plain_text(path, 9) == "one\ntwo\n"
    with pytest.raises(OSError, match="it has 9 bytes; at most 8 are allowed"):
        read_plain(path, 8)
    with path.open("r+b") as file:
        file.truncate(5 << 30)
    with pytest.raises(OSError, match=r"it has 5,368,709,120 bytes"):
        read_plain(path)


def test_the_output_of_a_command_is_a_stream_and_no_plain_file() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 0.1; echo one; echo two"], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        path = f"/dev/fd/{command.stdout.fileno()}"
        with pytest.raises(OSError, match="it is a pipe"):
            open_plain(path)
        assert read_plain(path, with_pipes=True) == b"one\ntwo\n"


def test_an_endless_pipe_ends_at_the_bound() -> None:
    with subprocess.Popen(["cat", "/dev/zero"], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        with pytest.raises(OSError, match="it has 1,001 bytes; at most 1,000 are allowed"):
            read_plain(f"/dev/fd/{command.stdout.fileno()}", 1000, with_pipes=True)
        command.kill()


def test_json_is_bounded_and_its_errors_are_of_one_type(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'{"a": [1, 2]}')
    assert read_plain_json(path) == {"a": [1, 2]} == parse_json('{"a": [1, 2]}')
    with pytest.raises(OSError, match="it has 13 bytes; at most 12 are allowed"):
        read_plain_json(path, 12)
    for text in (path.read_bytes(), path.read_text()):
        with pytest.raises(ValueError, match="it has about 3 values; at most 2 are allowed"):
            parse_json(text, 2)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)
    with pytest.raises(ValueError, match="Expecting value"):
        parse_json('{"a": ')


def test_a_file_whose_size_is_not_known_is_read_to_its_end() -> None:
    assert b"MemTotal" in read_plain("/proc/meminfo")
    with pytest.raises(OSError, match="it has 101 bytes; at most 100 are allowed"):
        read_plain("/proc/meminfo", 100)


def test_a_link_is_followed_only_where_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a")
    (tmp_path / "link").symlink_to("file")
    with open_plain(tmp_path / "link") as stream:
        assert stream.read() == b"a"
    with pytest.raises(OSError, match="symbolic links"):
        open_plain(tmp_path / "link", follows_links=False)


def test_the_checksum_is_that_of_the_rest_of_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"-abc")
    with open_plain(path) as stream:
        stream.read(1)
        digest = sha256_of(stream)
    assert digest == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", "FIPS 180-2, appendix B.1"
