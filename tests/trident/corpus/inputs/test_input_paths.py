"""What `--input` may name, shares of it, and the layouts other than jsonl."""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path

import pytest

from megatron.data.formats.indexed import IndexedDataset
from megatron.errors import ConfigError, DataError
from megatron.tokenizers.encoders.long_text import LongText
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import hard_documents
from tests.trident.corpus.preprocess_runs import quiet
from trident.corpus.inputs import block as block_module
from trident.corpus.inputs import input_blocks
from trident.corpus.inputs import lines as lines_module
from trident.corpus.inputs.block import InputBlock, parse_block
from trident.corpus.inputs.input_blocks import blocks, check_inputs, total_bytes
from trident.corpus.inputs.input_paths import Shard, expand_inputs, layout_of, read_separator, share_of
from trident.corpus.inputs.lines import parse_lines
from trident.corpus.preprocess.encode import EncodeOptions
from trident.corpus.preprocess.preprocess_corpus import preprocess


def texts_in(prefix: Path, choice: TokenizerChoice) -> list[str]:
    tokenizer, data = build_tokenizer(choice), IndexedDataset(prefix)
    return [tokenizer.decode(data[index]) for index in range(len(data))]


def test_folders_and_patterns_give_their_files_in_order(tmp_path: Path) -> None:
    for name in (
        "b.jsonl",
        "a.json",
        "sub/c.jsonl.gz",
        "sub/d.parquet",
        "e.txt",
        ".hidden.jsonl",
        ".git/x.json",
        "f.md",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    folder = str(tmp_path)
    below = [f"{folder}/{name}" for name in ("a.json", "b.jsonl", "sub/c.jsonl.gz", "sub/d.parquet")]
    assert expand_inputs([folder]) == tuple(below)
    assert expand_inputs([folder], "\n") == (*below[:2], f"{folder}/e.txt", *below[2:])
    assert expand_inputs([f"{folder}/*.js*", "-", f"{folder}/f.md"]) == (*below[:2], "-", f"{folder}/f.md")
    assert expand_inputs([f"{folder}/**/c*"]) == (below[2],) and expand_inputs([f"{folder}/s*"]) == tuple(below[2:])
    assert expand_inputs(["/nowhere/a.jsonl"]) == ("/nowhere/a.jsonl",)  # that it is missing is said with the others
    (tmp_path / "[1].jsonl").write_bytes(b"")
    assert expand_inputs([f"{folder}/[1].jsonl"]) == (f"{folder}/[1].jsonl",)


def test_patterns_and_folders_without_files_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--input .*\*\.zip matches no file(.|\n)*is a folder without files that end"
    ):
        expand_inputs([f"{tmp_path}/*.zip", str(tmp_path)])


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "-1/4", "a/b", "1/4/2", ""])
def test_a_shard_that_does_not_exist_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"--shard {text} is not a share. Give i/n"):
        Shard.of(text)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_shares_in_order_are_the_whole(tmp_path: Path, count: int) -> None:
    drawn = random.Random(count)
    lines = [b"%d " % number + b"x" * drawn.choice([0, 3, 90, 5000]) + b"\n" for number in range(120)]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines[:50]))
    (tmp_path / "b.jsonl").write_bytes(b"")
    (tmp_path / "c.gz").write_bytes(gzip.compress(b"".join(lines[50:70])))
    (tmp_path / "d.jsonl").write_bytes(b"".join(lines[70:])[:-1])
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.gz", "d.jsonl")]
    shares = [share_of(paths, Shard(number, count)) for number in range(1, count + 1)]
    read = [b"".join(block.read() for block in blocks(share, 1000)) for share in shares]
    assert b"".join(read) == b"".join(lines)[:-1]
    assert sum(total_bytes(share) or 0 for share in shares) == total_bytes(paths)
    assert [Shard(number, 12).suffix for number in (1, 12)] == ["_shard01of12", "_shard12of12"]
    assert all((part.start, part.stop) == (0, None) for part in shares[0]) == (count == 1)


def test_inputs_without_a_size_cannot_be_divided() -> None:
    with pytest.raises(
        ConfigError, match=r"--shard and --partitions divide files; --input - \(standard input\) is not a file"
    ):
        share_of(["-"], Shard(1, 2))


def test_shares_encode_to_the_whole(tmp_path: Path, choice: TokenizerChoice) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in hard_documents(200)))
    preprocess([str(path)], f"{tmp_path}/whole", EncodeOptions(choice), 1, quiet())
    found = []
    for number in (1, 2, 3):
        share = share_of([str(path)], Shard(number, 3))
        preprocess(share, f"{tmp_path}/{number}", EncodeOptions(choice), 1, quiet(), 2000)
        found.append((tmp_path / f"{number}_text_document.bin").read_bytes())
    assert b"".join(found) == (tmp_path / "whole_text_document.bin").read_bytes() and all(found)
    path.write_text(path.read_text() + "no json\n")
    line = len(hard_documents(200)) + 1
    with pytest.raises(DataError, match=rf"in\.jsonl:{line}: byte offset \d+: not JSON"):
        preprocess(share_of([str(path)], Shard(2, 2)), f"{tmp_path}/bad", EncodeOptions(choice), 1, quiet())


@pytest.mark.parametrize("separator", ["\n", "\n\n", "<|doc|>", "aba", "字"])
@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_plain_text_is_split_alike_for_any_block_size(tmp_path: Path, separator: str, suffix: str) -> None:
    drawn = random.Random(1)
    text = "".join(drawn.choice(["x", "a", "ab", "\n", "\n\n\n", "字é", separator, "ababa"]) for _ in range(4000))
    path = tmp_path / f"in{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    expected = text.split(separator)
    expected = expected if expected[-1] else expected[:-1]
    for block_bytes in (1, 50, 3000, 1 << 30):
        found = list(blocks([str(path)], block_bytes, separator))
        parsed = [parse_block(block, ["text"], False, separator) for block in found]
        assert [one for each in parsed for one in each.texts[0]] == expected
        assert sum(each.lines for each in parsed) == len(expected)
        assert sum(block.size for block in found) == len(text.encode())
        assert sum(block.input_bytes for block in found) == path.stat().st_size


def test_what_is_plain_text_and_what_is_not() -> None:
    assert read_separator(r"\n---\r\n\t") == "\n---\r\n\t"
    assert [layout_of(path, "\n") for path in ("a.TXT", "a.txt.gz", "-", "a.jsonl", "a.parquet")] == [
        "text", "text", "text", "jsonl", "parquet",
    ]  # fmt: skip
    assert [layout_of(path) for path in ("a.txt", "a.txt.zst", "-", "a.text")] == ["text", "text", "jsonl", "jsonl"]


@pytest.mark.parametrize("name", ["in.txt", "in.txt.gz"])
def test_a_txt_file_has_a_document_a_line_whatever_ends_it(tmp_path: Path, name: str) -> None:
    data = b"\xef\xbb\xbfone\r\ntwo\n\nf\xc3\xbcr \r inside\r\n\r\nlast\r"
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    for block_bytes in (1, 7, 1 << 20):
        found = [
            text for block in blocks([str(path)], block_bytes) for text in parse_block(block, ["text"], False).texts[0]
        ]
        assert found == ["one", "two", "", "für \r inside", "", "last\r"]


def test_lines_of_json_in_a_txt_file_are_refused_unless_they_are_the_text(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(
        DataError, match=r"in\.txt: a \.txt file is read as plain text.*first line is a JSON object.*jsonl"
    ):
        list(blocks([str(path)], 1 << 20))
    assert len(list(blocks([str(path)], 1 << 20, "\n"))) == 1
    path.write_text("{ no JSON }\n")
    assert len(list(blocks([str(path)], 1 << 20))) == 1


def test_plain_text_has_no_keys(tmp_path: Path, choice: TokenizerChoice) -> None:
    path = tmp_path / "in.txt"
    path.write_text("one\n")
    with pytest.raises(
        ConfigError, match=r"in\.txt is plain text, which has no keys, but 2 are requested: q, a\. Use one"
    ):
        preprocess([str(path)], f"{tmp_path}/out", EncodeOptions(choice, ("q", "a")), 1, quiet())


def test_a_folder_gives_its_txt_files_where_it_holds_no_other_inputs(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt.gz", "c.md"):
        (tmp_path / name).touch()
    assert expand_inputs([str(tmp_path)]) == (str(tmp_path / "a.txt"), str(tmp_path / "b.txt.gz"))
    (tmp_path / "d.jsonl").touch()
    assert expand_inputs([str(tmp_path)]) == (str(tmp_path / "d.jsonl"),)
    assert len(expand_inputs([str(tmp_path)], "\n")) == 3


def test_text_that_is_not_utf8_is_named_or_skipped(tmp_path: Path, choice: TokenizerChoice) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"\xef\xbb\xbfone\n\ntwo \xff\n\nthree")
    options = EncodeOptions(choice, document_separator="\n\n")
    with pytest.raises(DataError, match=r"in\.txt:2: byte offset 12: not UTF-8: byte 0xff"):
        preprocess([str(path)], f"{tmp_path}/out", options, 1, quiet())
    options = EncodeOptions(choice, skip_bad_lines=True, document_separator="\n\n")
    result = preprocess([str(path)], f"{tmp_path}/out", options, 2, quiet(), 1)
    assert texts_in(tmp_path / "out_text_document", choice) == ["one", "three"] and result.skipped == 1
    two_keys = parse_block(InputBlock("x", 1, 3, b"a\nb", 0, "text"), ["p", "q"], False, "\n").texts
    assert two_keys == [["a", "b"]] * 2 and two_keys[0] is not two_keys[1]


def test_nested_keys(tmp_path: Path, choice: TokenizerChoice) -> None:
    data = b'{"meta": {"body": "in"}, "x": "1"}\n{"meta.body": "exact", "meta": {"body": "no"}, "x": "2"}\n'
    parsed = parse_lines(data, ["meta.body"], True, False)
    assert parsed.texts == [["in", "exact"]]
    (tmp_path / "in.jsonl").write_bytes(data)
    preprocess([f"{tmp_path}/in.jsonl"], f"{tmp_path}/out", EncodeOptions(choice, ("meta.body", "x")), 1, quiet())
    assert texts_in(tmp_path / "out_meta.body_document", choice) == ["in", "exact"]
    assert texts_in(tmp_path / "out_x_document", choice) == ["1", "2"]
    for line, reason in (
        (b'{"meta": {}}', r"key 'meta\.body' \(--json-keys\) is missing; the line has 'meta'"),
        (b'{"meta": "body"}', "is missing"),
        (b'{"meta": {"body": 5}}', "holds a JSON number"),
    ):
        (tmp_path / "in.jsonl").write_bytes(line)
        with pytest.raises(DataError, match=reason):
            preprocess([f"{tmp_path}/in.jsonl"], f"{tmp_path}/bad", EncodeOptions(choice, ("meta.body",)), 1, quiet())


def test_parquet_gives_what_jsonl_gives(tmp_path: Path, choice: TokenizerChoice) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the pyarrow package is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = hard_documents(3000)
    table = arrow.table({"n": list(range(len(texts))), "text": texts, "meta": [{"body": text} for text in texts]})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=700)
    lines = [json.dumps({"text": text, "meta": {"body": text}}) + "\n" for text in texts]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    options = EncodeOptions(choice, ("text", "meta.body"), append_eod=True)
    for name, workers, block_bytes in (("in.jsonl", 1, 1 << 20), ("in.parquet", 1, 1 << 20), ("in.parquet", 2, 10_000)):
        preprocess([str(tmp_path / name)], f"{tmp_path}/{name}{workers}", options, workers, quiet(), block_bytes)
    for key in ("text", "meta.body"):
        for suffix in ("bin", "idx"):
            pairs = [
                (tmp_path / f"{name}_{key}_document.{suffix}").read_bytes()
                for name in ("in.jsonl1", "in.parquet1", "in.parquet2")
            ]
            assert pairs[0] == pairs[1] == pairs[2]


def test_invalid_parquet_is_named(tmp_path: Path, choice: TokenizerChoice) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the pyarrow package is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "in.parquet"
    parquet.write_table(arrow.table({"text": ["a", None, "b"], "n": [1, 2, 3]}), path)
    for key, reason in (
        ("body", "no column 'body' .--json-keys.; it has 'text', 'n'"),
        ("text", "in.parquet:2: .*column 'text' is null or missing"),
        ("n", "in.parquet:1: .*column 'n' holds a value of type int, not text"),
    ):
        with pytest.raises(DataError, match=reason):
            preprocess([str(path)], f"{tmp_path}/out", EncodeOptions(choice, (key,)), 1, quiet())
    preprocess([str(path)], f"{tmp_path}/out", EncodeOptions(choice, skip_bad_lines=True), 1, quiet())
    assert texts_in(tmp_path / "out_text_document", choice) == ["a", "b"]
    damaged = bytearray(path.read_bytes())
    damaged[4:60] = bytes(56)
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"in\.parquet: cannot be read past row 0"):
        list(blocks([str(path)], 100))
    path.write_bytes(b"no such format")
    with pytest.raises(DataError, match=r"in\.parquet is not a readable Parquet file"):
        check_inputs([str(path)], ["text"])


def test_missing_pyarrow_is_reported_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"in\.parquet requires the pyarrow package: pip install pyarrow"):
        check_inputs([str(tmp_path / "in.parquet")], ["text"])


@pytest.mark.parametrize("separator", ["\n\n", "|"])
@pytest.mark.parametrize("wrong", [False, True])
def test_long_documents_of_plain_text_are_the_same_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str, wrong: bool
) -> None:
    documents = [f"döcument {number} " * (number % 4 * 5) + "ü" * number for number in range(30)]
    data = separator.join(documents).encode()
    if wrong:
        data = data.replace("ü".encode() * 9, "ü".encode() * 8 + b"\xff")
    path = tmp_path / "in.txt"
    path.write_bytes(data)

    def parsed(hold_long: bool) -> tuple[list[str], int, list[int]]:
        texts, lines, offsets = [], 0, []
        for block in blocks([str(path)], 40, separator):
            found = parse_block(block, ("text",), True, separator, hold_long=hold_long)
            texts += [text.whole() if isinstance(text, LongText) else text for text in found.texts[0]]
            lines += found.lines
            offsets += [block.start + bad.offset for bad in found.bad]
        return texts, lines, offsets

    expected = parsed(False)
    monkeypatch.setattr(block_module, "LONG_LINE_BYTES", 20)
    monkeypatch.setattr(lines_module, "LONG_LINE_BYTES", 20)
    assert parsed(True) == expected
    assert bool(expected[2]) == wrong
    if not wrong:
        assert expected[0] == documents


def test_circular_links_and_files_matched_twice_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for place in ("a/1.jsonl", "a/b/2.jsonl", "a/.hidden.jsonl"):
        (tmp_path / place).write_text("{}\n")
    for name in ("one", "two"):  # through two circles a file has more paths than can be counted
        (tmp_path / "a" / name).symlink_to(tmp_path / "a", target_is_directory=True)
    expected = (str(tmp_path / "a/1.jsonl"), str(tmp_path / "a/b/2.jsonl"))
    assert expand_inputs([str(tmp_path)]) == expected
    assert sorted(expand_inputs([f"{tmp_path}/**/*.jsonl"])) == sorted(expected)
    assert sorted(expand_inputs([f"{tmp_path}/**"])) == sorted(expected)


def test_our_own_files_next_to_token_files_are_not_inputs(tmp_path: Path) -> None:
    for name in ("in.jsonl", "out_text_document.json", "out_text_document.idx", "index-cache/gpt-1.json", "b.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    assert expand_inputs([str(tmp_path)]) == (str(tmp_path / "b.json"), str(tmp_path / "in.jsonl"))


@pytest.mark.parametrize(
    ("separator", "expected"),
    [
        ("\n\n", ["a\r\nb", "c", "\r\nd\r", "e--\n--\r\n"]),
        ("\r\n\r\n", ["a\r\nb", "c\n", "d\r\r\n\ne--\n--\r\n"]),
        ("--\n", ["a\r\nb\r\n\r\nc\n\r\n\r\nd\r\r\n\ne", ""]),
        ("\n", ["a", "b", "", "c", "", "", "d\r", "", "e--", "--"]),
    ],
)
def test_line_feeds_of_a_separator_are_also_those_of_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str, expected: list[str]
) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"a\r\nb\r\n\r\nc\n\r\n\r\nd\r\r\n\ne--\n--\r\n")
    for read_bytes in (1, 2, 3, 1 << 20):
        monkeypatch.setattr(input_blocks, "_READ_BYTES", read_bytes)
        parsed = [parse_block(block, ["text"], False, separator) for block in blocks([str(path)], 1, separator)]
        assert [text for block in parsed for text in block.texts[0]] == expected


def test_files_skipped_in_a_folder_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.jsonl", "b.csv", "c.csv", "notes.txt", ".hidden", "d.idx", "d.bin", "d.json"):
        (tmp_path / name).touch()
    assert expand_inputs([str(tmp_path)]) == (str(tmp_path / "a.jsonl"),)
    assert "3 files that are not inputs are skipped (2 .csv, 1 .txt)" in capsys.readouterr().err
