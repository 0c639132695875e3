"""Workers that stop answering are named but not killed, and may continue."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from megatron.tokenizers.tokenizer import TokenizerChoice
from tests.trident.corpus.preprocess_runs import quiet
from trident.corpus.preprocess.encode import EncodedBlock, EncodeOptions, EncodeWork
from trident.corpus.preprocess.preprocess_corpus import preprocess
from trident.corpus.workers import pipes
from trident.corpus.workers import pool as pool_module
from trident.corpus.workers.pool import WorkerPool
from trident.corpus.workers.processes import WorkerError
from trident.corpus.workers.progress_line import ProgressLine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is read from /proc")


class Stopper(ProgressLine):
    """Stops the first worker when the first result has come, and does something when the run complains of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: signal.Signals) -> None:
        super().__init__(None, 1, lambda text: None)
        self.pool: WorkerPool[EncodedBlock] | None = None
        self.victim = 0
        self.then = then
        self.warnings: list[str] = []
        stopper = self

        class Watched(WorkerPool[EncodedBlock]):
            def __init__(self, work: EncodeWork, workers: int) -> None:
                super().__init__(work, workers)
                stopper.pool = self

        monkeypatch.setattr(pool_module, "WorkerPool", Watched)
        monkeypatch.setattr(pipes, "PATIENCE_SECONDS", 0.2)
        monkeypatch.setattr(pipes.log, "warning", self.hear)

    def advance(self, documents: int, text_bytes: int, input_bytes: int) -> None:
        if not self.victim and self.pool is not None:
            self.victim = self.pool.process_ids[0]
            os.kill(self.victim, signal.SIGSTOP)
        super().advance(documents, text_bytes, input_bytes)

    def hear(self, text: str) -> None:
        if "It is stopped" in text:
            self.warnings.append(text)
            os.kill(self.victim, self.then)


def inputs(folder: Path, is_streamed: bool) -> tuple[str]:
    """A file that workers read themselves, or one whose blocks, longer than a pipe takes, are sent to them."""
    data = "".join(json.dumps({"text": f"some text {number} " * 40}) + "\n" for number in range(20_000)).encode()
    path = folder / ("in.jsonl.gz" if is_streamed else "in.jsonl")
    path.write_bytes(gzip.compress(data, 1) if is_streamed else data)
    return (str(path),)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stopped_worker_is_named_and_finishes_once_continued(
    tmp_path: Path, choice: TokenizerChoice, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = inputs(tmp_path, is_streamed), EncodeOptions(choice)
    preprocess(source, f"{tmp_path}/one", options, 1, quiet())
    stopper = Stopper(monkeypatch, signal.SIGCONT)
    preprocess(source, f"{tmp_path}/two", options, 2, stopper, 2 << 20)
    assert stopper.warnings[0].startswith(
        f"preprocessing worker 0 (pid {stopper.victim}) has not responded for 0.2 seconds. It is stopped by a signal "
        f"or a debugger: `kill -CONT {stopper.victim}` continues it"
    )
    for suffix in ("bin", "idx"):
        written = [(tmp_path / f"{name}_text_document.{suffix}").read_bytes() for name in ("one", "two")]
        assert written[0] == written[1]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stopped_worker_that_is_killed_is_an_error(
    tmp_path: Path, choice: TokenizerChoice, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = inputs(tmp_path, is_streamed)
    stopper = Stopper(monkeypatch, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"preprocessing worker 0 \(pid \d+\) was killed by signal 9 \(SIGKILL\)"):
        preprocess(source, f"{tmp_path}/out", EncodeOptions(choice), 2, stopper, 2 << 20)
    assert [path.name for path in tmp_path.iterdir()] == [Path(source[0]).name]
