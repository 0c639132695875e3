"""Preprocessing in parts: killed at any moment and started again, the same bytes and nothing left over."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.sidecar import read_sidecar
from megatron.errors import ConfigError, DataError, StorageError
from megatron.tokenizers.tokenizer import TokenizerChoice
from tests.helpers.vocabulary import hard_documents, write_vocabulary
from tests.trident.corpus.preprocess_runs import quiet
from trident.corpus.inputs.input_paths import Shard, expand_inputs
from trident.corpus.preprocess import partitions as resume_module
from trident.corpus.preprocess import preprocess_corpus as preprocess_module
from trident.corpus.preprocess.encode import BlockEncoder, EncodeOptions
from trident.corpus.preprocess.partitions import divide, preprocess_in_parts
from trident.corpus.preprocess.preprocess_corpus import PreprocessResult, preprocess

needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="the run to kill is forked")


@pytest.fixture(autouse=True)
def encoders_of_all_tests(monkeypatch: pytest.MonkeyPatch, built: dict[EncodeOptions, BlockEncoder]) -> None:
    """Encoders are built once: that takes longer than all the rest of a run here."""

    def encoder(options: EncodeOptions) -> BlockEncoder:
        return built.get(options) or built.setdefault(options, BlockEncoder(options))

    for module in (preprocess_module, resume_module):
        monkeypatch.setattr(module, "BlockEncoder", encoder)


@pytest.fixture(scope="module")
def built() -> dict[EncodeOptions, BlockEncoder]:
    return {}


@pytest.fixture
def options(choice: TokenizerChoice, tmp_path: Path) -> EncodeOptions:
    """Two keys, and the input `in.jsonl` with both."""
    with (tmp_path / "in.jsonl").open("w") as stream:
        for number, text in enumerate(hard_documents(200)):
            stream.write(json.dumps({"a": text, "b": f"the {number}th"}) + "\n")
    return EncodeOptions(choice, keys=("a", "b"), append_eod=True)


def in_parts(folder: Path, options: EncodeOptions, count: int = 3, workers: int = 1) -> PreprocessResult:
    shares = divide([f"{folder}/in.jsonl"], count, None, None, options.keys)
    return preprocess_in_parts(shares, f"{folder}/out/o", options, workers, quiet(), 2000)


def whole(folder: Path, options: EncodeOptions) -> dict[str, bytes]:
    """What a run over everything at once writes."""
    preprocess((f"{folder}/in.jsonl",), f"{folder}/whole/o", options, 1, quiet())
    return pairs(folder / "whole")


def pairs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


FINISHED = {f"o_{key}_document.{suffix}" for key in "ab" for suffix in ("bin", "idx", "json")}


@pytest.mark.parametrize(("count", "workers"), [(2, 1), (7, 2), (1000, 1)])
def test_parts_merged_are_the_whole(tmp_path: Path, options: EncodeOptions, count: int, workers: int) -> None:
    if count == 1000:  # more parts than lines
        lines = (tmp_path / "in.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "in.jsonl").write_text("".join(lines[:3]))
        count = 12
    result = in_parts(tmp_path, options, count, workers)
    assert pairs(tmp_path / "out") == whole(tmp_path, options)
    assert names(tmp_path / "out") == FINISHED
    made, expected = (read_sidecar(tmp_path / folder / "o_a_document") for folder in ("out", "whole"))
    assert made is not None and expected is not None
    assert (made.documents, made.empty, made.skipped, made.tokens) == (
        expected.documents,
        expected.empty,
        expected.skipped,
        expected.tokens,
    )
    assert result == preprocess((f"{tmp_path}/in.jsonl",), f"{tmp_path}/out/o", options, 1, quiet())


def test_the_parts_of_the_shards_are_the_whole(tmp_path: Path, options: EncodeOptions) -> None:
    paths = [f"{tmp_path}/in.jsonl"] * 2
    shards = [divide(paths, 3, Shard(number, 2), None, options.keys) for number in (1, 2)]
    assert shards[0] + shards[1] == divide(paths, 6, None, None, options.keys)
    with pytest.raises(ConfigError, match=r"--input /gone\.jsonl cannot be read"):
        divide(["/gone.jsonl", *paths], 3, None, None, options.keys)


def killed_after(moments: int, work: Callable[[], Any]) -> bool:
    """Runs `work` in a forked process which kills itself at a moment; says whether it came so far.

    Moments are calls that change what is on disk for good: syncs, renames, removals.
    """

    def run() -> None:
        left = [moments]

        def then_die(call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*words: Any, **more: Any) -> Any:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return call(*words, **more)

            return counted

        os.fsync = then_die(os.fsync)  # type: ignore[assignment]
        for name in ("replace", "unlink", "rmdir"):
            setattr(Path, name, then_die(getattr(Path, name)))
        work()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.full
@needs_fork
@pytest.mark.parametrize(("workers", "first", "step"), [(1, 0, 13), (2, 20, 60)])
def test_a_run_killed_at_any_time_can_be_continued(
    tmp_path: Path, options: EncodeOptions, workers: int, first: int, step: int
) -> None:
    expected = whole(tmp_path, options)
    moments, was_killed = first, True
    while was_killed:
        was_killed = killed_after(moments, lambda: in_parts(tmp_path, options, 3, workers))
        result = in_parts(tmp_path, options, 3, workers)
        assert pairs(tmp_path / "out") == expected, moments
        assert names(tmp_path / "out") == FINISHED, moments
        assert result.documents == len(IndexedDataset(tmp_path / "out/o_a_document")) + 207
        for path in (tmp_path / "out").iterdir():
            path.unlink()
        moments += step
    assert moments > 100


@needs_fork
def test_finished_partitions_are_not_repeated(
    tmp_path: Path, options: EncodeOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encoded: list[str] = []
    encode = resume_module.preprocess_blocks

    def counted(source: Any, prefix: str, *more: Any) -> PreprocessResult:
        encoded.append(Path(prefix).name)
        return encode(source, prefix, *more)

    def stopped(*words: Any, **more: Any) -> None:
        raise StorageError("no room")

    monkeypatch.setattr(resume_module, "preprocess_blocks", counted)
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="no room"):
        patch.setattr(resume_module, "merge", stopped)
        in_parts(tmp_path, options)
    assert "3 of 3 parts are finished and kept in" in capsys.readouterr().err
    parts = tmp_path / "out" / ".o_a_document.parts"
    (parts / "part2of3_b_document.bin").write_bytes(b"")  # a disk may forget
    in_parts(tmp_path, options)
    assert encoded == ["part1of3", "part2of3", "part3of3", "part2of3"]
    assert f"2 of 3 parts were finished by an earlier run ({parts}) and are skipped." in capsys.readouterr().err
    assert pairs(tmp_path / "out") == whole(tmp_path, options) and names(tmp_path / "out") == FINISHED


def left_behind(folder: Path, options: EncodeOptions) -> Path:
    """Has a run stop at a bad line in its third part."""
    good = (folder / "in.jsonl").read_bytes()
    (folder / "in.jsonl").write_bytes(good + b"no JSON\n")
    number = good.count(b"\n") + 1
    with pytest.raises(DataError, match=rf"in\.jsonl:{number}: byte offset {len(good)}: not JSON"):
        in_parts(folder, options)
    return folder / "out" / ".o_a_document.parts"


def test_parts_of_another_run_are_kept_and_named(tmp_path: Path, options: EncodeOptions) -> None:
    parts = left_behind(tmp_path, options)
    before = names(parts)
    assert "part2of3_b_document.idx" in before and "part3of3_a_document.idx" not in before
    other = write_vocabulary(tmp_path, 520)
    changes: list[tuple[EncodeOptions, int, str]] = [
        (replace(options, append_eod=False), 3, "other --append-eod: true then, false now"),
        (replace(options, is_cached=True), 3, "other --dataset-impl: false then, true now"),
        (replace(options, tokenizer=other), 3, 'other the tokenizer: {"name": "GPT2BPETokenizer", '),
        (options, 4, "other --partitions or --shard:"),
    ]
    for changed, count, text in changes:
        with pytest.raises(ConfigError) as caught:
            in_parts(tmp_path, changed, count)
        assert text in str(caught.value) and f"rm -r '{parts}'" in str(caught.value)
    os.utime(tmp_path / "in.jsonl", ns=(0, 0))
    with pytest.raises(ConfigError, match=r"with other --input \(files, their sizes and times of change\): .* then"):
        in_parts(tmp_path, options)
    assert names(parts) == before


def test_tables_are_divided_by_rows_and_watched(
    tmp_path: Path, choice: TokenizerChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sqlite3.connect(tmp_path / "in.db") as connection:
        connection.execute("CREATE TABLE docs (text TEXT)")
        connection.executemany("INSERT INTO docs VALUES (?)", [(text or "x",) for text in hard_documents(50)])
    connection.close()
    options = EncodeOptions(choice)
    (path,) = expand_inputs([f"sqlite:///{tmp_path}/in.db"])
    preprocess((path,), f"{tmp_path}/whole/o", options, 1, quiet())

    def run() -> None:
        shares = divide([path], 3, None, None, options.keys)
        assert len(shares) == 3
        preprocess_in_parts(shares, f"{tmp_path}/out/o", options, 1, quiet())

    run()
    assert pairs(tmp_path / "out") == pairs(tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(resume_module, "merge", None)
        run()
    os.utime(tmp_path / "in.db", ns=(0, 0))
    with pytest.raises(ConfigError, match=r"with other --input \(files, their sizes and times of change\)"):
        run()


def test_bad_lines_may_be_skipped_on_the_second_attempt(tmp_path: Path, options: EncodeOptions) -> None:
    left_behind(tmp_path, options)
    result = in_parts(tmp_path, replace(options, skip_bad_lines=True))
    assert result.skipped == 1 and names(tmp_path / "out") == FINISHED
    assert pairs(tmp_path / "out") == whole(tmp_path, replace(options, skip_bad_lines=True))


def test_a_partition_with_skipped_lines_is_repeated_if_they_are_errors(
    tmp_path: Path, options: EncodeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"no JSON\n" + (tmp_path / "in.jsonl").read_bytes())
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(resume_module, "merge", None)
        in_parts(tmp_path, replace(options, skip_bad_lines=True))
    with pytest.raises(DataError, match=r"in\.jsonl:1: byte offset 0: not JSON"):
        in_parts(tmp_path, options)


def test_a_run_that_fails_in_its_first_part_leaves_nothing(tmp_path: Path, options: EncodeOptions) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"no JSON\n" + (tmp_path / "in.jsonl").read_bytes())
    with pytest.raises(DataError, match=r"in\.jsonl:1: byte offset 0"):
        in_parts(tmp_path, options)
    assert names(tmp_path / "out") == set()


def test_a_foreign_folder_is_not_modified(tmp_path: Path, options: EncodeOptions) -> None:
    folder = tmp_path / "out" / ".o_a_document.parts"
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds mine\.txt without a manifest\.json, so this tool did not write it"):
        in_parts(tmp_path, options)
    assert (folder / "mine.txt").read_text() == "mine"
    (folder / "mine.txt").unlink()
    (folder / "lock").unlink()
    folder.rmdir()
    folder.write_text("a file")
    with pytest.raises(StorageError, match=r"Cannot write .*\.o_a_document\.parts: File exists"):
        in_parts(tmp_path, options)


@needs_fork
def test_two_runs_do_not_write_the_same_parts(
    tmp_path: Path, options: EncodeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def try_too(*words: Any, **more: Any) -> None:
        process = multiprocessing.get_context("fork").Process(target=in_parts_or_exit, args=(tmp_path, options))
        process.start()
        process.join()
        codes.append(process.exitcode)
        merge(*words, **more)

    codes: list[int | None] = []
    merge = resume_module.merge
    monkeypatch.setattr(resume_module, "merge", try_too)
    in_parts(tmp_path, options)
    assert codes == [3, 3] and names(tmp_path / "out") == FINISHED


def in_parts_or_exit(folder: Path, options: EncodeOptions) -> None:
    try:
        in_parts(folder, options)
    except ConfigError as failure:
        os._exit(3 if "Another run writes its parts to" in str(failure) else 4)
    os._exit(5)


def test_a_parts_folder_that_cannot_be_removed_is_a_storage_error(
    tmp_path: Path, options: EncodeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch, pytest.raises(StorageError, match=r"\.o_a_document\.parts: Permission denied"):
        patch.setattr(Path, "rmdir", refused)
        in_parts(tmp_path, options)
    assert names(tmp_path / "out") == {*FINISHED, ".o_a_document.parts"}
    in_parts(tmp_path, options)
    assert names(tmp_path / "out") == FINISHED
