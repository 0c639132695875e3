"""What reads and encodes may die, run out of memory or lose its file: a typed error at once, never a hang."""

from __future__ import annotations

import _thread
import contextlib
import errno
import io
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.recovery import find
from megatron.data import loader as loader_module
from megatron.observe.metrics_file import read_steps
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, train_here, write_tiny_corpus
from tests.helpers.vocabulary import write_vocabulary
from trident.corpus.preprocess import encode as encode_module
from trident.corpus.preprocess.encode import EncodeOptions
from trident.corpus.preprocess.preprocess_corpus import preprocess
from trident.corpus.workers.progress_line import ProgressLine

SAMPLES_BEFORE = 10  # of 4 a step: the fault comes while step 3 or 4 is read
Damage = Callable[[TinyCorpus], None]


@pytest.fixture
def corpus(tmp_path: Path) -> TinyCorpus:
    folder = tmp_path / "corpus"
    folder.mkdir()
    return write_tiny_corpus(folder)


def truncate(corpus: TinyCorpus) -> None:
    os.truncate(corpus.prefix + ".bin", 100)


def lose_the_disk(corpus: TinyCorpus) -> None:
    """Of the tokens; a checkpoint is still read back."""
    lost = os.path.realpath(corpus.prefix + ".bin")

    def failing(read: Any) -> Any:
        def fail(handle: int, *words: Any, **more: Any) -> Any:
            if os.path.realpath(f"/proc/self/fd/{handle}") == lost:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(handle, *words, **more)

        return fail

    for name in ("pread", "preadv"):
        setattr(os, name, failing(getattr(os, name)))


def run_out_of_memory(corpus: TinyCorpus) -> None:
    raise MemoryError


def leave(corpus: TinyCorpus) -> None:
    _thread.exit()


def refuse_threads(corpus: TinyCorpus) -> None:
    def refuse(*words: Any) -> int:
        raise RuntimeError("can't start new thread")

    _thread.start_new_thread = refuse


def train_with_fault(
    rank: int, flags: list[str], corpus: TinyCorpus, damage: Damage | None, at_start: bool = False
) -> tuple[int, str, str]:
    """Trains while the reader meets a fault; the exit code, the text of the error, and what was said."""
    read, count = loader_module.MicroBatches._sample, 0

    def counted(self: Any, number: int) -> Any:
        nonlocal count
        count += 1
        if count == SAMPLES_BEFORE and damage is not None and not at_start:
            damage(corpus)
        return read(self, number)

    loader_module.MicroBatches._sample = counted  # type: ignore[method-assign]
    loader_module._MOST_AHEAD_BATCHES = 1  # the whole run would be read at once
    if at_start and damage is not None:
        damage(corpus)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code, text = train_here(rank, flags)
    return code, text, said.getvalue()


@pytest.mark.parametrize(
    ("damage", "code", "sentence"),
    [
        (truncate, 65, r"tiny_text_document.bin: the file ended \d+ bytes short .* truncated while in use"),
        (lose_the_disk, 74, r"tiny_text_document.bin: \d+ bytes at byte offset \d+ cannot be read: Input/output error"),
        (run_out_of_memory, 74, "Reading data ahead failed with MemoryError"),
        (leave, 74, "Reading data ahead failed with SystemExit"),
    ],
)
def test_a_fault_of_the_reader_ends_the_run_and_keeps_what_was_saved(
    corpus: TinyCorpus, tmp_path: Path, damage: Damage, code: int, sentence: str
) -> None:
    flags = corpus.flags(folder=tmp_path, save_interval=1, eval_iters=0)
    ((found, text, _),) = run_ranks(train_with_fault, 1, flags, corpus, damage)
    assert found == code and re.search(sentence, text), text
    saved = [found.step for found in find(tmp_path / "checkpoints")]
    assert saved and 1 <= max(saved) <= max(read_steps(tmp_path / "run")) < 8


def test_without_a_thread_training_reads_on_demand_and_ends_the_same(corpus: TinyCorpus, tmp_path: Path) -> None:
    told = {}
    for name, damage in (("ahead", None), ("on demand", refuse_threads)):
        flags = corpus.flags(run_dir=tmp_path / name / "run", eval_interval=2, eval_iters=2)
        ((code, text, told[name]),) = run_ranks(train_with_fault, 1, flags, corpus, damage, True)
        assert code == 0, text
    assert "the read-ahead thread could not be started" not in told["ahead"]
    assert told["on demand"].count("the read-ahead thread could not be started") == 1
    ahead, on_demand = (
        {step: record["lm_loss"] for step, record in read_steps(tmp_path / name / "run").items()} for name in told
    )
    assert ahead == on_demand and len(ahead) == 8


def starve_a_worker(folder: Path) -> None:
    """Preprocesses with workers that have no memory left; for a process without threads, which forks its workers."""
    choice = write_vocabulary(folder)
    (folder / "in.jsonl").write_text('{"text": "some text"}\n' * 20_000)
    parent, encode = os.getpid(), encode_module.BlockEncoder.encode

    def starved(self: Any, *words: Any) -> Any:
        assert os.getpid() != parent
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20),) * 2)
        held = bytes(1 << 28)  # more than any free list has
        return encode(self, *words), held

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode_module.BlockEncoder, "encode", starved)
        patch.setattr("trident.corpus.workers.pool.usable_cores", lambda: 2)
        progress = ProgressLine(None, 1, lambda text: None)
        options = EncodeOptions(choice)
        preprocess((str(folder / "in.jsonl"),), str(folder / "out"), options, 2, progress, 1 << 16)


@pytest.mark.skipif(sys.platform != "linux", reason="measures the address space through /proc")
def test_a_preprocessing_worker_without_memory_is_an_error_and_leaves_no_files(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\n"
        "from megatron import process_exit\n"
        "from tests.reliability.test_workers import starve_a_worker\n"
        f"process_exit.exit_with(lambda: starve_a_worker(Path({str(tmp_path)!r})))\n"
    )
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    said = ended.stderr.rpartition("error: ")[2]  # after the traceback that the worker itself prints
    assert ended.returncode not in (0, 1) and "worker" in said and "Traceback" not in said, ended.stderr
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".out*"))
