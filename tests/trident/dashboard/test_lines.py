"""Files that grow while they are read: half lines, cuts, replacements, links, and lines that are no records."""

from __future__ import annotations

import os
from pathlib import Path

from trident.dashboard.lines import LineTail, parse_records, read_object, read_tail


def test_only_whole_lines_are_read_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tail = LineTail(path)
    assert tail.read().lines == () and not tail.read().is_new  # it does not exist yet
    path.write_bytes(b"one\ntw")
    assert tail.read().lines == (b"one",)
    assert tail.read().lines == ()
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tail.read().lines == (b"two", b"three") and tail.progress == 1.0


def test_a_file_that_is_cut_or_replaced_or_deleted_begins_again(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"one\ntwo\n")
    tail = LineTail(path)
    tail.read()
    path.write_bytes(b"1\n")
    cut = tail.read()
    assert cut.is_new and cut.lines == (b"1",)
    other.write_bytes(b"another file\n")
    os.replace(other, path)
    replaced = tail.read()
    assert replaced.is_new and replaced.lines == (b"another file",)
    path.unlink()
    assert tail.read().is_new and not tail.read().is_new
    path.write_bytes(b"back\n")
    assert tail.read().lines == (b"back",)


def test_long_files_come_in_parts_and_lines_longer_than_a_part_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"a\n" * 10 + b"x" * 100 + b"\nlast\n")
    tail, found, parts = LineTail(path, part_bytes=16), [], 0
    while (part := tail.read()).has_more or part.lines:
        found += part.lines
        parts += 1
    assert found == [b"a"] * 10 + [b"last"] and parts > 5


def test_links_and_folders_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password\n")
    for place in ("link", "folder", "pipe"):
        path = tmp_path / place
        if place == "link":
            path.symlink_to(secret)
        else:
            path.mkdir() if place == "folder" else os.mkfifo(path)
        assert LineTail(path).read().lines == () and read_tail(path, 100) == ("", 0) and read_object(path) is None
        assert LineTail(path).sampled(3) == []


def test_lines_that_are_no_records_are_left_out() -> None:
    assert parse_records([b'{"a":1}', b'{"b":', b"[1]", b"", b"\xff", b'{"c":2}']) == [{"a": 1}, {"c": 2}]
    assert parse_records([b'{"a":1', b'"b":2}']) == []  # joined, they would be one
    assert parse_records([]) == []


def test_a_sample_of_lines_is_in_order_and_has_the_last(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("".join(f"{number} {'x' * (number % 90)}\n" for number in range(5000)))
    numbers = [int(line.split()[0]) for line in LineTail(path).sampled(50)]
    assert numbers == sorted(set(numbers)) and numbers[-1] == 4999 and 45 <= len(numbers) <= 51


def test_the_end_of_a_text_and_an_object(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first\nsecond\nthird \xff\n")
    assert read_tail(path, 14) == ("third �\n", 21)
    assert read_tail(path, 1000)[0].startswith("first")
    path.write_text('{"a": 1}')
    assert read_object(path) == {"a": 1} and read_object(path, most_bytes=3) is None
    path.write_text("[1]")
    assert read_object(path) is None
    path.write_text('{"a":' * 500 + "1" + "}" * 500)
    assert read_object(path) is None, "too deep to be shown"
