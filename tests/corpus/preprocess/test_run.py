"""From jsonl to token files: the right ids, the same bytes for any number of workers, and nothing half-published."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.corpus.inputs.sources import Block
from megatron.corpus.preprocess.encode import BlockEncoder, EncodedBlock, EncodeOptions
from megatron.corpus.preprocess.encode_work import EncodeWork
from megatron.corpus.preprocess.run import PreprocessResult, preprocess
from megatron.corpus.workers import pool as pool_module
from megatron.corpus.workers import processes
from megatron.corpus.workers.pool import WorkerPool
from megatron.corpus.workers.processes import WorkerError
from megatron.corpus.workers.progress import ProgressLine
from megatron.data.formats.indexed import IndexedDataset
from megatron.errors import ConfigError, DataError, StorageError
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import hard_documents, write_vocabulary

START_METHODS = ["spawn", "fork"] if sys.platform == "linux" else ["spawn"]


@pytest.fixture(scope="module")
def choice(tmp_path_factory: pytest.TempPathFactory) -> TokenizerChoice:
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary"))


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "n": index}) + "\n" for index, text in enumerate(texts)))
    return path


def quiet() -> ProgressLine:
    return ProgressLine(None, 1, lambda text: None)


def run(
    inputs: list[Path], prefix: Path, options: EncodeOptions, workers: int = 1, block_bytes: int = 4096
) -> PreprocessResult:
    return preprocess(tuple(map(str, inputs)), str(prefix), options, workers, quiet(), block_bytes)


def both(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("append_eod", [False, True])
def test_every_document_is_there_in_order(tmp_path: Path, choice: TokenizerChoice, append_eod: bool) -> None:
    texts = hard_documents(400)
    result = run(
        [write_jsonl(tmp_path / "in.jsonl", texts)], tmp_path / "out", EncodeOptions(choice, append_eod=append_eod)
    )
    tokenizer = build_tokenizer(choice)
    expected = [tokenizer.encode(text) + [tokenizer.eod_id] * append_eod for text in texts if text]
    data = IndexedDataset(tmp_path / "out_text_document")
    assert [data[index].tolist() for index in range(len(data))] == expected
    assert data.documents.tolist() == list(range(len(expected) + 1)) and data.dtype == np.uint16
    assert result.documents == len(expected) and result.empty == len(texts) - len(expected)
    assert result.tokens == sum(map(len, expected))


def test_same_bytes_for_any_workers_blocks_and_compression(tmp_path: Path, choice: TokenizerChoice) -> None:
    texts = hard_documents(700)
    plain = write_jsonl(tmp_path / "in.jsonl", texts)
    first, second = write_jsonl(tmp_path / "1.jsonl", texts[:300]), tmp_path / "2.jsonl.gz"
    second.write_bytes(gzip.compress(write_jsonl(tmp_path / "2.jsonl", texts[300:]).read_bytes()))
    options = EncodeOptions(choice, append_eod=True)
    run([plain], tmp_path / "one", options)
    expected = both(tmp_path / "one_text_document")
    for name, inputs, workers, block_bytes in (
        ("big", [plain], 1, 1 << 30),
        ("two", [plain], 2, 3000),
        ("three", [first, second], 3, 5000),
    ):
        run(inputs, tmp_path / name, options, workers, block_bytes)
        assert both(tmp_path / f"{name}_text_document") == expected, name


@pytest.mark.parametrize("workers", [1, 2])
def test_the_cached_layout_holds_the_same_documents(tmp_path: Path, choice: TokenizerChoice, workers: int) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", hard_documents(300))
    run([path], tmp_path / "mmap", EncodeOptions(choice, append_eod=True))
    run([path], tmp_path / "cached", EncodeOptions(choice, append_eod=True, is_cached=True), workers)
    mmap, cached = (IndexedDataset(tmp_path / f"{name}_text_document") for name in ("mmap", "cached"))
    assert cached.is_cached and cached.dtype == np.int32 and not mmap.is_cached
    assert [ids.tolist() for ids in cached[:]] == [ids.tolist() for ids in mmap[:]]
    assert cached.documents.tolist() == mmap.documents.tolist()


def test_several_keys_give_several_pairs(tmp_path: Path, choice: TokenizerChoice) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"a": "one", "b": ""}\n{"a": "two", "b": "three"}\n')
    result = run([path], tmp_path / "out", EncodeOptions(choice, keys=("a", "b")), workers=2)
    assert result.prefixes == (f"{tmp_path}/out_a_document", f"{tmp_path}/out_b_document")
    assert [len(IndexedDataset(prefix)) for prefix in result.prefixes] == [2, 1]
    assert result.empty == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named_and_nothing_is_published(tmp_path: Path, choice: TokenizerChoice, workers: int) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["some text"] * 500)
    start = path.stat().st_size
    with path.open("ab") as stream:
        stream.write(b'{"text": 5}\n{"text": "after"}\nnot json\n')
    with pytest.raises(
        DataError, match=rf"in\.jsonl:501: byte offset {start}: key 'text' holds a JSON number.*--on-bad-line skip"
    ):
        run([path], tmp_path / "out", EncodeOptions(choice), workers)
    assert sorted(name.name for name in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_can_be_skipped_with_a_count(
    tmp_path: Path, choice: TokenizerChoice, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["some text"] * 500)
    with path.open("ab") as stream:
        stream.write(b'{"text": 5}\n{"text": "after"}\n' + b"\xff\n" * 300)
    result = run([path], tmp_path / "out", EncodeOptions(choice, skip_bad_lines=True), workers)
    assert (result.documents, result.skipped) == (501, 301)
    shown = capsys.readouterr().err
    assert "in.jsonl:501: byte offset" in shown and "in.jsonl:503:" in shown and shown.count("skipped") < 20


@pytest.mark.parametrize("workers", [1, 2])
def test_line_numbers_start_again_in_each_file(tmp_path: Path, choice: TokenizerChoice, workers: int) -> None:
    first = write_jsonl(tmp_path / "1.jsonl", ["some text"] * 300)
    second = tmp_path / "2.jsonl.gz"
    second.write_bytes(gzip.compress(first.read_bytes() + b"[]\n"))
    with pytest.raises(DataError, match=r"2\.jsonl\.gz:301: byte offset \d+: the line holds a JSON array"):
        run([first, second], tmp_path / "out", EncodeOptions(choice), workers)


def test_a_killed_worker_is_named_at_once(tmp_path: Path, choice: TokenizerChoice) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["some text " * 200] * 20_000)
    killed: list[tuple[int, float]] = []

    class Killer(ProgressLine):
        """Kills the second worker once the work is under way."""

        def advance(self, documents: int, text_bytes: int, input_bytes: int) -> None:
            if not killed and self.text_bytes > 1_000_000:
                victim = pools[0].process_ids[1]
                os.kill(victim, signal.SIGKILL)
                killed.append((victim, time.monotonic()))
            super().advance(documents, text_bytes, input_bytes)

    pools: list[WorkerPool[EncodedBlock]] = []

    class Watched(WorkerPool[EncodedBlock]):
        def __init__(self, work: EncodeWork, workers: int) -> None:
            super().__init__(work, workers)
            pools.append(self)

    patch = pytest.MonkeyPatch()
    patch.setattr(pool_module, "WorkerPool", Watched)
    try:
        with pytest.raises(
            WorkerError, match=r"preprocessing worker 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\)"
        ) as caught:
            preprocess(
                (str(path),),
                str(tmp_path / "out"),
                EncodeOptions(choice),
                2,
                Killer(None, 1, lambda text: None),
                1 << 18,
            )
    finally:
        patch.undo()
    victim, killed_at = killed[0]
    assert str(victim) in str(caught.value)
    assert time.monotonic() - killed_at < 5
    assert sorted(name.name for name in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_worker_killed_while_it_starts_is_named(choice: TokenizerChoice, start_method: str) -> None:
    def blocks_and_a_kill() -> Iterator[Block]:
        for number, block in enumerate(endless()):
            if number == 2:
                os.kill(pool.process_ids[0], signal.SIGKILL)
            yield block

    with WorkerPool(EncodeWork(BlockEncoder(EncodeOptions(choice))), 2, start_method) as pool:
        assert pool.process_ids == []
        with pytest.raises(WorkerError, match=r"preprocessing worker 0 \(pid \d+\) was killed by signal 9"):
            for _ in pool.run(blocks_and_a_kill()):
                pass


def test_workers_start_as_blocks_arrive_and_write_ids_themselves(tmp_path: Path, choice: TokenizerChoice) -> None:
    data = b'{"text": "some text"}\n' * 1000
    encoder = BlockEncoder(EncodeOptions(choice))
    ids = encoder.encode(Block("<test>", 1, len(data), data, 0)).keys[0].ids
    assert ids is not None
    for start_method in START_METHODS:
        target = tmp_path / start_method
        target.touch()
        with WorkerPool(EncodeWork(encoder), 8, start_method) as pool:
            for number, (_, result) in enumerate(pool.run(Block("<test>", 1, len(data), data, 0) for _ in range(2))):
                assert result.keys[0].ids is None and result.place is not None
                result.place([(str(target), number * ids.nbytes)])
            assert len(pool.process_ids) == 2
            assert target.read_bytes() == ids.tobytes() * 2


def test_ids_that_cannot_be_written_are_a_storage_error(tmp_path: Path, choice: TokenizerChoice) -> None:
    data = b'{"text": "some text"}\n'
    with (
        WorkerPool(EncodeWork(BlockEncoder(EncodeOptions(choice))), 1) as pool,
        pytest.raises(StorageError, match=r"Cannot write .*/gone/out\.bin: No such file"),
    ):
        for _, result in pool.run([Block("<test>", 1, len(data), data, 0)]):
            assert result.place is not None
            result.place([(str(tmp_path / "gone" / "out.bin"), 0)])


def test_no_more_workers_than_cores_or_blocks(
    tmp_path: Path, choice: TokenizerChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Watched(WorkerPool[EncodedBlock]):
        def __init__(self, work: EncodeWork, workers: int) -> None:
            asked.append(workers)
            super().__init__(work, workers)

    monkeypatch.setattr(pool_module, "WorkerPool", Watched)
    monkeypatch.setattr(pool_module, "usable_cores", lambda: 3)
    path = write_jsonl(tmp_path / "in.jsonl", ["some text"] * 100)
    run([path], tmp_path / "one", EncodeOptions(choice), 8, 1 << 20)
    assert asked == []
    run([path], tmp_path / "many", EncodeOptions(choice), 8, 1000)
    assert asked == [3] and both(tmp_path / "one_text_document") == both(tmp_path / "many_text_document")
    assert processes.usable_cores() >= 1 and processes.start_method() in ("fork", "spawn")


def endless() -> Iterator[Block]:
    """Blocks without end."""
    data = b'{"text": "some text"}\n' * 1000
    while True:
        yield Block("<test>", 1, len(data), data, 0)


def test_large_blocks_through_the_pipes_do_not_lock_up(choice: TokenizerChoice) -> None:
    data = b'{"text": "some text 1 2 3 4 5 6 7 8 9 and so on"}\n' * 60_000
    with WorkerPool(EncodeWork(BlockEncoder(EncodeOptions(choice))), 2) as pool:
        results = list(pool.run(Block("<test>", 1, len(data), data, 0) for _ in range(12)))
    assert len(results) == 12 and all(result.lines == 60_000 for _, result in results)


def test_workers_say_what_is_wrong_with_the_tokenizer(tmp_path: Path) -> None:
    choice = write_vocabulary(tmp_path)
    path = write_jsonl(tmp_path / "in.jsonl", ["a"])
    missing = TokenizerChoice("GPT2BPETokenizer", "/nowhere/v.json", "/nowhere/m.txt")
    with pytest.raises(ConfigError, match=r"--vocab-file /nowhere/v\.json is not a file"):
        run([path], tmp_path / "out", EncodeOptions(missing), workers=2)
    encoder = BlockEncoder(EncodeOptions(choice))
    Path(str(choice.vocab_file)).unlink()
    with (
        WorkerPool(EncodeWork(encoder), 1, "spawn") as pool,
        pytest.raises(ConfigError, match="--vocab-file .* is not a file"),
    ):
        list(pool.run(endless()))


def test_a_file_that_vanishes_is_a_data_error_from_a_worker(tmp_path: Path, choice: TokenizerChoice) -> None:
    pool = WorkerPool(EncodeWork(BlockEncoder(EncodeOptions(choice))), 1)
    with pool, pytest.raises(DataError, match=r"gone\.jsonl: cannot be read"):
        list(pool.run([Block(str(tmp_path / "gone.jsonl"), 0, 10, None, 10)]))


def test_an_input_without_documents_gives_an_empty_pair(tmp_path: Path, choice: TokenizerChoice) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"text": ""}\n')
    result = run([tmp_path / "in.jsonl"], tmp_path / "out", EncodeOptions(choice, append_eod=True))
    assert (result.documents, result.empty, result.tokens) == (0, 1, 0)
    assert Path(f"{tmp_path}/out_text_document.bin").stat().st_size == 0


def test_progress_on_a_terminal_and_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines: list[str] = []
    bars: list[str] = []
    plain, bar = ProgressLine(100, 10, lines.append), ProgressLine(100, 10, lines.append, bars.append)
    for _ in range(5):
        now[0] += 2.0
        plain.advance(10, 2_000_000, 10)
        bar.advance(10, 2_000_000, 10)
    assert lines[-1] == "Processed 50 documents (5.0 docs/s, 1.00 MB/s)." and len(lines) == 5
    assert "50%" in bars[-1] and "ETA 0:10" in bars[-1] and "1.0 MB/s" in bars[-1]
    unknown = ProgressLine(None, 10, lines.append, bars.append)
    now[0] += 2.0
    unknown.advance(5, 10_000_000, 0)
    assert "ETA" not in bars[-1] and "10 MB" in bars[-1]
    unknown.finish()
    assert lines[-1].startswith("Processed 5 documents")
