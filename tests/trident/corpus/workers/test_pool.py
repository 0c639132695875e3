"""The worker pool: its size, workers that die, and large blocks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.tokenizers.tokenizer import TokenizerChoice
from tests.trident.corpus.preprocess_runs import START_METHODS, endless, pair_bytes, run, write_numbered_lines
from trident.corpus.inputs.block import InputBlock
from trident.corpus.preprocess.encode import BlockEncoder, EncodedBlock, EncodeOptions, EncodeWork
from trident.corpus.preprocess.preprocess_corpus import preprocess
from trident.corpus.workers import pool as pool_module
from trident.corpus.workers import processes
from trident.corpus.workers.pool import WorkerPool
from trident.corpus.workers.processes import WorkerError
from trident.corpus.workers.progress_line import ProgressLine


def test_a_killed_worker_is_named_at_once(tmp_path: Path, choice: TokenizerChoice) -> None:
    path = write_numbered_lines(tmp_path / "in.jsonl", ["some text " * 200] * 20_000)
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
    assert time.monotonic() - killed_at < 60
    assert sorted(name.name for name in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_worker_killed_while_it_starts_is_named(choice: TokenizerChoice, start_method: str) -> None:
    def blocks_and_a_kill() -> Iterator[InputBlock]:
        for number, block in enumerate(endless()):
            if number == 2:
                os.kill(pool.process_ids[0], signal.SIGKILL)
            yield block

    with WorkerPool(EncodeWork(BlockEncoder(EncodeOptions(choice))), 2, start_method) as pool:
        assert pool.process_ids == []
        with pytest.raises(WorkerError, match=r"preprocessing worker 0 \(pid \d+\) was killed by signal 9"):
            for _ in pool.run(blocks_and_a_kill()):
                pass


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
    path = write_numbered_lines(tmp_path / "in.jsonl", ["some text"] * 100)
    run([path], tmp_path / "one", EncodeOptions(choice), 8, 1 << 20)
    assert asked == []
    run([path], tmp_path / "many", EncodeOptions(choice), 8, 1000)
    assert asked == [3] and pair_bytes(tmp_path / "one_text_document") == pair_bytes(tmp_path / "many_text_document")
    assert processes.usable_cores() >= 1 and processes.start_method() in ("fork", "spawn")


def test_large_blocks_through_the_pipes_do_not_deadlock(choice: TokenizerChoice) -> None:
    data = b'{"text": "some text 1 2 3 4 5 6 7 8 9 and so on"}\n' * 60_000
    with WorkerPool(EncodeWork(BlockEncoder(EncodeOptions(choice))), 2) as pool:
        results = list(pool.run(InputBlock("<test>", 1, len(data), data, 0) for _ in range(12)))
    assert len(results) == 12 and all(result.lines == 60_000 for _, result in results)
