"""A whole run: nothing is lost without a reason, and the bytes do not depend on workers and blocks."""

from __future__ import annotations

import gzip
import json
import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.errors import ConfigError, DataError, StorageError
from tests.helpers.vocabulary import hard_documents, write_vocabulary
from tests.trident.corpus.cleaning.runs import clean_texts, quiet, read_jsonl, write_jsonl
from trident.corpus.cleaning.clean_corpus import CleanOutputs, check_output, clean_corpus, write_lines
from trident.corpus.cleaning.documents.clean_options import CleanOptions, ContaminationChoice, LengthLimits, NearChoice

EVERYTHING = CleanOptions(
    normalize_space=True,
    lengths=LengthLimits(minimum_characters=3, maximum_characters=2000, minimum_words=1, maximum_words=300),
    gopher_repetition=True,
    exact_duplicates=True,
    near=NearChoice(),
    skip_bad_lines=True,
    keep_originals=True,
)


def run(folder: Path, source: Path, options: CleanOptions, workers: int = 1, block_bytes: int = 1 << 20) -> list[bytes]:
    """Cleans a file; gives the bytes of all three outputs."""
    outputs = [folder / name for name in ("kept.jsonl", "dropped.jsonl", "report.json")]
    clean_corpus([str(source)], CleanOutputs(*map(str, outputs)), options, workers, quiet(), block_bytes)
    return [path.read_bytes() for path in outputs]


def test_the_bytes_do_not_depend_on_workers_and_blocks(tmp_path: Path) -> None:
    texts = hard_documents(200)
    drawn = random.Random(0)
    (tmp_path / "task.txt").write_text("abc xyz abc 019 it's the straße\n" + " ".join(texts[0].split("\n")) * 3)
    source = write_jsonl(tmp_path / "in.jsonl", [drawn.choice(texts) for _ in range(600)])
    with source.open("ab") as file:
        file.write(b"no json\n" + gzip.compress(b"nor this").replace(b"\n", b"") + b"\n")
    contamination = ContaminationChoice((str(tmp_path / "task.txt"),), run=3, shortest_run=2, drops=True)
    options = replace(EVERYTHING, contamination=contamination)
    whole = run(tmp_path, source, options)
    assert whole == run(tmp_path, source, options, block_bytes=1000)
    assert whole == run(tmp_path, source, options, workers=2, block_bytes=3000)
    described = json.loads(whole[2])
    assert described["dropped_for"]["exact duplicate"]["documents"] > 100
    assert described["dropped_for"]["bad line"]["documents"] == 2
    assert {"empty", "too few characters", "too many characters", "contaminated", "near duplicate"} < set(
        described["dropped_for"]
    )


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.one_of(st.text(max_size=12), st.none(), st.integers(), st.just("\xa0same\n\n\n\n\nsame")), max_size=25),
    st.integers(1, 200),
    st.integers(0, 4),
)
def test_kept_and_dropped_are_what_was_read(documents: list[object], block_bytes: int, least: int) -> None:
    options = CleanOptions(
        normalize_space=True,
        lengths=LengthLimits(minimum_characters=least),
        exact_duplicates=True,
        near=NearChoice(threshold=0.5, permutations=16, shingle=1, unit="character"),
        skip_bad_lines=True,
        keep_originals=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        source = write_jsonl(Path(folder) / "in.jsonl", [{"text": text, "at": at} for at, text in enumerate(documents)])
        source.write_bytes(source.read_bytes().replace(b"\n", b"\n\n"))  # blank lines are not documents
        kept, dropped, report = run(Path(folder), source, options, block_bytes=block_bytes)
    described = json.loads(report)
    assert described["read"] == len(documents) == described["kept"] + described["dropped"]
    assert described["dropped"] == sum(found["documents"] for found in described["dropped_for"].values())
    places = [json.loads(line)["at"] for line in kept.splitlines()]
    lost = [json.loads(line) for line in dropped.splitlines()]
    assert places == sorted(places) and len(places) == described["kept"] == described["written"]
    assert sorted(places + [entry["line"] // 2 for entry in lost]) == list(range(len(documents)))
    for entry in lost:
        original = json.loads(entry["raw"]) if "raw" in entry else entry["document"]
        assert original == {"text": documents[entry["line"] // 2], "at": entry["line"] // 2}


def test_lengths_have_both_ends(tmp_path: Path) -> None:
    limits = LengthLimits(minimum_characters=3, maximum_characters=9, minimum_words=2, maximum_words=3)
    texts = ["ab", "abc", "a b", "a b c d", "a b c", "abcd efgh", "abcd efghi"]
    kept, report = clean_texts(tmp_path, texts, CleanOptions(lengths=limits))
    assert kept == ["a b", "a b c", "abcd efgh"]
    assert {reason: found.documents for reason, found in report.dropped.items()} == {
        "too few characters": 1,
        "too few words": 1,
        "too many words": 1,
        "too many characters": 1,
    }
    assert report.dropped["too many characters"].examples == [
        {"where": f"{tmp_path / 'in.jsonl'}:7", "shown": "abcd efghi", "detail": "10"}
    ]


def test_lengths_in_tokens(tmp_path: Path) -> None:
    limits = LengthLimits(minimum_tokens=3, maximum_tokens=5, tokenizer=write_vocabulary(tmp_path, 300))
    kept, report = clean_texts(
        tmp_path, ["\x01\x02", "\x01\x02\x03", "\x01\x02\x03\x04\x05\x06"], CleanOptions(lengths=limits)
    )
    assert kept == ["\x01\x02\x03"]
    assert report.dropped["too few tokens"].examples[0]["detail"] == "2"
    assert report.dropped["too many tokens"].examples[0]["detail"] == "6"


def test_exact_duplicates_differ_in_spaces_only(tmp_path: Path) -> None:
    texts = ["one two", " one\n\ttwo ", "One two", "one  two", "caf\u00e9", "cafe\u0301", "one two"]
    kept, report = clean_texts(tmp_path, texts, CleanOptions(exact_duplicates=True), block_bytes=30)
    assert kept == ["one two", "One two", "caf\u00e9"]
    assert report.dropped["exact duplicate"].documents == 4
    assert report.dropped["exact duplicate"].examples[0]["shown"] == " one\n\ttwo "


def test_a_bad_line_stops(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "a"}\n{"text": "b"}\n{"text": }\n')
    for workers in (1, 2):
        outputs = CleanOutputs(str(tmp_path / "out.jsonl"))
        with pytest.raises(DataError, match=r"in\.jsonl:3: byte offset 37: not JSON.*--on-bad-line skip"):
            clean_corpus([str(source)], outputs, CleanOptions(), workers, quiet(), 10)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_lines_are_counted_in_each_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = [write_jsonl(tmp_path / name, ["a", 1, "b"]) for name in ("x.jsonl", "y.jsonl")]
    report = clean_corpus(
        [str(path) for path in inputs],
        CleanOutputs(str(tmp_path / "out.jsonl")),
        CleanOptions(skip_bad_lines=True),
        1,
        quiet(),
    )
    places = [example["where"] for example in report.dropped["bad line"].examples]
    assert places == [f"{path}:2" for path in inputs]
    assert "y.jsonl:2: byte offset 14: " in capsys.readouterr().err


def test_parquet_and_text_and_compressed_output(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("one\ntwo\n\nthree\n")
    options = CleanOptions(document_separator="\n")
    packed = tmp_path / "out.jsonl.gz"
    report = clean_corpus([str(source)], CleanOutputs(str(packed)), options, 1, quiet())
    again = tmp_path / "again.jsonl.gz"
    clean_corpus([str(source)], CleanOutputs(str(again)), options, 1, quiet())
    assert again.read_bytes() == packed.read_bytes()
    assert gzip.decompress(packed.read_bytes()) == b'{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n'
    assert report.read == 4 and report.dropped["empty"].documents == 1
    parquet = pytest.importorskip("pyarrow.parquet", reason="the pyarrow package is not installed")
    arrow = pytest.importorskip("pyarrow")
    rows = arrow.table({"text": ["a", None, "b"], "id": [1, 2, 3], "left": [1, 1, 1]})
    parquet.write_table(rows, tmp_path / "in.parquet")
    kept = tmp_path / "out.jsonl"
    options = CleanOptions(kept_columns=("id",), skip_bad_lines=True)
    clean_corpus([str(tmp_path / "in.parquet")], CleanOutputs(str(kept)), options, 1, quiet())
    assert read_jsonl(kept) == [{"text": "a", "id": 1}, {"text": "b", "id": 3}]


def test_zstandard_output(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="the zstandard package is not installed")
    source = write_jsonl(tmp_path / "in.jsonl", ["a", "b"])
    packed = tmp_path / "out.jsonl.zst"
    clean_corpus([str(source)], CleanOutputs(str(packed)), CleanOptions(), 1, quiet())
    with zstandard.ZstdDecompressor().stream_reader(packed.read_bytes()) as stream:
        assert stream.read() == source.read_bytes()


def test_invalid_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(write_jsonl(tmp_path / "in.jsonl", ["a"]))

    def attempt(*outputs: str | None) -> None:
        clean_corpus([source], CleanOutputs(*outputs), CleanOptions(), 1, quiet())  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=r"--output .*in\.jsonl is the same file as --input .*in\.jsonl"):
        attempt(source)
    with pytest.raises(ConfigError, match=r"--report a is the same file as --output a"):
        attempt("a", None, "a")
    with pytest.raises(ConfigError, match=r"--output out\.jsonl\.xz: \.xz is not supported.*\.jsonl\.gz"):
        attempt("out.jsonl.xz")
    with pytest.raises(StorageError, match=rf"Cannot write {tmp_path}"):
        attempt(str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"--dropped d\.zst requires the zstandard package \(pip install zstandard\)"):
        attempt("a", "d.zst")


def test_a_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("the file system takes names of UTF-8 only")
    kept, dropped, report = run(folder, write_jsonl(folder / "in.jsonl", ["a", "abc"]), EVERYTHING)
    assert json.loads(kept) == {"text": "abc"}
    assert json.loads(dropped)["source"] == str(folder / "in.jsonl")
    assert json.loads(report)["dropped_for"]["too few characters"]["examples"][0]["where"] == f"{folder}/in.jsonl:1"


LINES = b'{"text": "a"}\n' * 1000


def unpacked(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(data)
    if path.suffix == ".zst":
        return pytest.importorskip("zstandard").ZstdDecompressor().decompressobj().decompress(data)  # type: ignore[no-any-return]
    return data


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_the_suffix_determines_the_compression(tmp_path: Path, suffix: str) -> None:
    for name in ("a", "b"):
        write_lines(str(tmp_path / (name + suffix)), lambda lines: lines.write(LINES))
    first, second = (tmp_path / (name + suffix) for name in ("a", "b"))
    assert unpacked(first) == LINES and first.read_bytes() == second.read_bytes()


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(lines: object) -> None:
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        write_lines(str(tmp_path / "a.jsonl.gz"), fail)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".bz2", ".xz", ".parquet"])
def test_other_suffixes_are_refused(suffix: str) -> None:
    with pytest.raises(ConfigError, match=rf"--output out{suffix}: \{suffix} is not supported"):
        check_output("--output", f"out{suffix}")
