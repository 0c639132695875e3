"""Shards: all are published or none, and processes that fail are named."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.errors import StorageError
from megatron.files.replacing import temporary_name
from tests.trident.corpus.featurize.small_windows import RECORD, small
from trident.corpus.featurize import shards as featurize_shards
from trident.corpus.featurize.featurize_corpus import featurize_tokens
from trident.corpus.workers.processes import WorkerError


def test_older_shards_and_leftovers_of_killed_runs_are_removed(
    tmp_path: Path, shards: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    process = multiprocessing.get_context("fork").Process(target=leave_something, args=(tmp_path,))
    process.start()
    process.join()
    assert len(list(tmp_path.glob(".w*"))) == 2
    (tmp_path / "w-notes").touch()
    again = featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/w", RECORD, small(), 1)
    assert sorted(tmp_path.glob("w-*")) == [Path(again.shards[0]), tmp_path / "w-notes"]
    assert not list(tmp_path.glob(".w*")) and capsys.readouterr().err.count("left behind by a killed run") == 2


def leave_something(folder: Path) -> None:
    temporary_name(folder / "w-00003-of-00009").touch()
    scratch = temporary_name(folder / "w")
    scratch.mkdir()
    (scratch / "tokens.bin").touch()


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def forked_with(**changes: object) -> AbstractContextManager[object]:
    """Makes processes inherit a patched module, even if a library's threads would make them spawn."""
    return patch.multiple(featurize_shards, start_method=lambda: "fork", **changes)


def test_a_killed_process_is_named_and_nothing_is_published(tmp_path: Path, shards: tuple[str, ...]) -> None:
    before = {path: Path(path).read_bytes() for path in shards}

    def die(plan: object, shard: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with forked_with(_write_shard=die), pytest.raises(WorkerError, match="was killed by signal 9"):
        featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/w", RECORD, small(num_shards=2), 2)
    assert {path: Path(path).read_bytes() for path in shards} == before and not list(tmp_path.glob(".*"))


def test_a_failure_in_a_worker_is_a_one_sentence_error(tmp_path: Path, shards: tuple[str, ...]) -> None:
    def fail(plan: object, shard: object) -> None:
        raise StorageError("Cannot write x: No space left on device")

    with forked_with(_write_shard=fail), pytest.raises(StorageError, match="No space left"):
        featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/w", RECORD, small(num_shards=2), 2)
    assert len(list(tmp_path.glob("w-*"))) == len(shards)
