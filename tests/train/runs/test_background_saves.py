"""A run that saves in the background: what it saves, and how it ends when saving fails or a signal arrives."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.storage import Storage
from megatron.errors import ConfigError, ExitCode
from megatron.train.callbacks import saving
from tests.helpers.campaign_cases import mark_campaign
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, losses, train, train_here, write_tiny_corpus

MODES = ("--async-save", "--no-async-save")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


def saved(folder: Path) -> dict[str, Any]:
    """Everything in a run's checkpoints, but the names of saves, digests of manifests, and the configuration."""
    found: dict[str, Any] = {}
    for path in sorted((folder / "checkpoints").glob("iter_*/*")):
        name = str(path.relative_to(folder))
        if path.name == "manifest.json":
            manifest: dict[str, Any] = json.loads(path.read_text())
            del manifest["run"], manifest["digest"], manifest["record"]["config"]
            manifest["record"].pop("run_id", None)
            found[name] = manifest
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def logged(folder: Path) -> str:
    """What rank 0 of a run said."""
    return (folder / "run" / "log.txt").read_text()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, {}), (2, {"zero_stage": 3, "bf16": ()}), (2, {"pipeline_model_parallel_size": 2, "zero_stage": 0})],
    ids=["plain", "dp2-zero3-bf16", "pp2"],
)
def test_both_ways_save_the_same(
    corpus: TinyCorpus, tmp_path: Path, world_size: int, layout: Mapping[str, Any]
) -> None:
    for mode in MODES:
        flags = corpus.flags(mode, folder=tmp_path / mode, save_interval=1, **layout)
        assert train(flags, world_size) == (0, "")
    assert losses(tmp_path / MODES[0]) == losses(tmp_path / MODES[1])
    first, second = saved(tmp_path / MODES[0]), saved(tmp_path / MODES[1])
    assert len([name for name in first if name.endswith("manifest.json")]) == 8
    assert first == second


@pytest.mark.parametrize("mode", mark_campaign(MODES, MODES[:1]))
def test_values_that_are_not_finite_are_never_saved(corpus: TinyCorpus, tmp_path: Path, mode: str) -> None:
    common = {"save_interval": 1, "lr_decay_style": "constant", "lr_warmup_fraction": None, "min_lr": None}
    assert train(corpus.flags(mode, folder=tmp_path, exit_interval=2, **common)) == (0, "")
    code, text = train(corpus.flags(mode, folder=tmp_path, **common, lr=1e38))
    assert code == ExitCode.NUMERICS, text
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*")) == ["iter_0000001", "iter_0000002"]
    assert not list((tmp_path / "checkpoints").glob(".tmp-iter*"))
    assert train(corpus.flags(mode, folder=tmp_path, **common)) == (0, "")
    assert sorted(losses(tmp_path)) == list(range(1, 9))


class Disk:
    """Replaces the writing of files: refuses it from a step on, or holds it up until a gate opens."""

    def __init__(self) -> None:
        self.refuse_from: int | None = None
        self.refuse_to: int | None = None
        self.gate: threading.Event | None = None
        self.is_writing = threading.Event()
        self.step = 0
        create = Storage.create

        def patched(storage: Storage, path: Path) -> int:
            if path.name.startswith("pieces"):
                self.is_writing.set()
                if self.gate is not None:
                    self.gate.wait(120)
                self.step += 1
                last = math.inf if self.refuse_to is None else self.refuse_to
                if self.refuse_from is not None and self.refuse_from <= self.step <= last:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return create(storage, path)

        Storage.create = patched  # type: ignore[method-assign]


def with_full_disk(rank: int, flags: list[str], from_save: int, to_save: int | None = None) -> tuple[int, str]:
    disk = Disk()
    if rank == 1:
        disk.refuse_from, disk.refuse_to = from_save, to_save
    return train_here(rank, flags)


def failed_saves(folder: Path) -> list[int]:
    """The steps that a run says it could not save, in both of its files."""
    found = []
    for name in ("metrics.jsonl", "events.jsonl"):
        records = [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]
        found.append([record["iteration"] for record in records if record["kind"] == "failed_save"])
    assert found[0] == found[1]
    return found[0]


@pytest.mark.full
@pytest.mark.parametrize("mode", mark_campaign(MODES, MODES[:1]))
@pytest.mark.parametrize("exits_at_first", [False, True], ids=["three", "first"])
def test_saves_that_are_refused_in_a_row_end_all_ranks_at_the_same_step(
    corpus: TinyCorpus, tmp_path: Path, mode: str, exits_at_first: bool
) -> None:
    """The disk of one rank is full from the second save on."""
    more = ["--exit-on-failed-save"] if exits_at_first else []
    long = {"train_iters": 4000, "lr_decay_iters": 100}
    flags = corpus.flags(mode, *more, folder=tmp_path, save_interval=2, zero_stage=1, keep_last=1, **long)
    first, second = run_ranks(with_full_disk, 2, flags, 2)
    assert (first[0], second[0]) == (ExitCode.STORAGE, ExitCode.STORAGE)
    reason = "of --exit-on-failed-save." if exits_at_first else "3 consecutive saves failed (--max-failed-saves 3)."
    assert "No space left on device" in second[1] and second[1].endswith(reason)
    assert first[1] == "rank 1: " + second[1].removeprefix("rank 1: ")
    tolerated = 0 if exits_at_first else 2
    warned = "Training continues; the next attempt is at the next --save-interval."
    assert logged(tmp_path).count(warned) == tolerated
    assert failed_saves(tmp_path) == [4, 6, 8][: tolerated + 1]
    folder = tmp_path / "checkpoints"
    assert [path.name for path in folder.glob("iter_*")] == ["iter_0000002"] and not list(folder.glob(".tmp*"))
    assert 4 + 2 * tolerated <= max(losses(tmp_path)) < 100
    if not exits_at_first:
        assert train(corpus.flags(folder=tmp_path, exit_interval=4, **long)) == (0, "")


def stopped_while_writing(rank: int, flags: list[str], stop: str, killed: str) -> tuple[int, str]:
    """The stop is asked for while step 2 is being written; the disk goes on when the loop waits for it."""
    disk = Disk()
    disk.gate = threading.Event()

    def ask() -> None:
        disk.is_writing.wait(120)
        if stop == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif stop == "file" and rank == 0:
            Path(killed).touch()
        threading.Timer(0.5, disk.gate.set).start()  # type: ignore[union-attr]

    threading.Thread(target=ask).start()
    return train_here(rank, flags)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stop", ["signal", "file", "interval", "end"])
def test_whatever_ends_a_run_waits_for_the_save_and_saves_the_last_step(
    corpus: TinyCorpus, tmp_path: Path, stop: str
) -> None:
    more = {"train_iters": 3} if stop == "end" else {"train_iters": 4000, "lr_decay_iters": 100}
    if stop == "interval":
        more["exit_interval"] = 3
    flags = corpus.flags(
        folder=tmp_path, save_interval=2, kill_switch_path=tmp_path / "stop", lr_warmup_fraction=None, **more
    )
    results = run_ranks(stopped_while_writing, 2, flags, stop, str(tmp_path / "stop"))
    assert {code for code, _ in results} == {ExitCode.REQUEUE if stop == "signal" else ExitCode.DONE}
    last = max(losses(tmp_path))
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*"))
    assert {"iter_0000002", f"iter_{last:07d}"} <= set(names)
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))


def with_little_memory(rank: int, flags: list[str]) -> tuple[int, str, str]:
    """Exit code and text of a run, and what it said."""
    saving.available_memory_bytes = lambda: 5000  # type: ignore[assignment]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return *train_here(rank, flags), said.getvalue()


def test_a_state_that_does_not_fit_into_memory_is_refused_or_saved_at_once(corpus: TinyCorpus, tmp_path: Path) -> None:
    ((code, text, _),) = run_ranks(with_little_memory, 1, corpus.flags("--async-save", folder=tmp_path))
    assert code == ConfigError.exit_code
    assert text.startswith("--async-save: a copy of the state of the 1 rank(s) on ")
    assert "bytes of host memory, but only 5000 bytes are available. Use --no-async-save" in text
    ((code, text, said),) = run_ranks(with_little_memory, 1, corpus.flags(folder=tmp_path))
    assert (code, text) == (0, "")
    assert said.count("saves will be synchronous, as with --no-async-save.") == 1
    assert (tmp_path / "checkpoints" / "iter_0000008").is_dir()


def test_a_run_that_ended_before_its_first_save_starts_again_in_its_folders(corpus: TinyCorpus, tmp_path: Path) -> None:
    code, _ = train(corpus.flags(folder=tmp_path, save_interval=1, lr=1e38, lr_warmup_fraction=None))
    assert code == ExitCode.NUMERICS
    assert not list((tmp_path / "checkpoints").glob("iter_*"))
    assert train(corpus.flags(folder=tmp_path)) == (0, "")
    assert sorted(losses(tmp_path)) == list(range(1, 9))
