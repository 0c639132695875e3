"""When a run is saved, what its record holds, and what a refusing disk does to it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron import __version__
from megatron.checkpoint import SaveOptions
from megatron.checkpoint.background_writer import SaveOutcome
from megatron.checkpoint.record import Progress, Record
from megatron.config import SavingConfig
from megatron.engine.freezing import NOTHING_FROZEN
from megatron.errors import CheckpointError, NumericsError, StorageError
from megatron.observe.styles import megatron
from megatron.parallel.mesh import ParallelMesh, standard_axes
from megatron.train.callback import Callback, CallbackList
from megatron.train.callbacks import saving
from megatron.train.callbacks.saving import Saving
from megatron.train.restarts.identity import RunIdentity
from megatron.train.stop import StopVerdict
from megatron.train.watchdog import Watch
from tests.checkpoint.made.records import PLAN


class Disk:
    """A stand-in for `checkpoint.save` that records the calls and fails a given number of times."""

    def __init__(self) -> None:
        self.refusals = 0
        self.steps: list[int] = []
        self.calls: list[tuple[Any, ...]] = []

    def save(
        self,
        directory: Path,
        step: int,
        pieces: Any,
        record: Any,
        mesh: Any,
        options: SaveOptions,
    ) -> None:
        assert options.lines is megatron.SAVE_LINES
        self.calls.append((directory, pieces, record, options.lock, options.after_commit))
        if self.refusals:
            self.refusals -= 1
            raise StorageError(f"cannot write {directory}: No space left on device.")
        self.steps.append(step)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    fake = Disk()
    monkeypatch.setattr(saving, "save_checkpoint", fake.save)
    monkeypatch.setattr(saving, "owned_pieces", lambda engine, *, with_optimizer: ("pieces", with_optimizer))
    monkeypatch.setattr(saving, "data_fingerprint", lambda data: {"of": data})
    return fake


class Remembering(Callback):
    """Has something to keep, and notes the saves that fail."""

    def __init__(self, told: list[tuple[Any, ...]]) -> None:
        self.told = told

    def failed_save(self, run: Any, step: int, reason: str) -> None:
        self.told.append((step, reason))

    def state(self, run: Any) -> dict[str, Any]:
        return {
            "recent": {"loss": [2.5]},
            "passed_batches": ({"step": 2, "first_sample": 8, "last_sample": 15},),
            "counter": {"seen": 3},
        }


def run_at(step: int, *, rank: int = 0, writer: Any = None, **saving: Any) -> Any:
    """As much of a run as saving looks at; `told` is what it reports of failed saves."""
    told: list[tuple[Any, ...]] = []
    mesh = ParallelMesh.at(standard_axes(2), rank) if writer is None else ParallelMesh.single()
    lock: Any = "lock"
    reports: Any = SimpleNamespace(flush=lambda run: None)
    evaluator: Any = SimpleNamespace(validation_loss=lambda at: 2.25 if at == step else None)
    identity = RunIdentity("0123456789abcdef", {"run_id": "fedcba9876543210", "step": 3})
    followers = CallbackList([Remembering(told)])
    return SimpleNamespace(
        config=SimpleNamespace(
            data="data",
            saving=SavingConfig(**{"save": "checkpoints", "save_interval": 2, **saving}),
            safety=SimpleNamespace(check_replicas_interval=0),
            to_json=lambda: {"config": 1},
        ),
        engine=SimpleNamespace(
            update_count=step - 1,
            view=SimpleNamespace(loss_scale_state=lambda: {"cur_scale": 2.0}),
            freezing=NOTHING_FROZEN,
            averaging_weight=0.0,
        ),
        mesh=mesh,
        data=SimpleNamespace(
            plan=PLAN,
            tokenizer=SimpleNamespace(fingerprint="f", vocab_size=600, name="GPT2BPE", eod_id=0, behaviour={}),
        ),
        progress=Progress(step, 8 * step, 80 * step),
        saving=Saving(identity, followers, reports, evaluator, lock, writer),
        stopping=SimpleNamespace(verdict=StopVerdict.CONTINUE),
        watch=Watch(),
        followers=followers,
        report=SimpleNamespace(style=megatron, failed_save=lambda progress, *words: told.append(words)),
        told=told,
    )


def record_of(run: Any) -> Record:
    record: Record = run.saving.record(run)
    return record


def save(run: Any, *, must_succeed: bool = False) -> None:
    run.saving.save(run, must_succeed=must_succeed)


def test_a_step_is_saved_once(disk: Disk) -> None:
    run = run_at(4)
    run.saving.save(run)
    run.saving.save(run, must_succeed=True)
    assert disk.steps == [4]
    assert run.saving.saved_step == 4
    directory, pieces, record, lock, after = disk.calls[0]
    assert (directory, pieces, lock) == (Path("checkpoints"), ("pieces", True), "lock")
    assert after == run.followers.after_save
    assert record == run.saving.record(run).to_json()


def test_a_failed_save_is_reported_and_training_continues(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_at(4)
    disk.refusals = 1
    run.saving.save(run)
    said = capsys.readouterr().err
    assert "cannot write checkpoints: No space left on device." in said
    assert "Training continues; the next attempt is at the next --save-interval." in said
    assert "The run ends if 2 more consecutive saves fail (--max-failed-saves 3)." in said
    assert run.told[0] == (4, "cannot write checkpoints: No space left on device.", 1) and len(run.told) == 2
    assert (run.saving.saved_step, run.saving.failed) == (None, 1)
    run.progress = Progress(6, 48, 480)
    run.saving.save(run)
    assert (disk.steps, run.saving.saved_step, run.saving.failed) == ([6], 6, 0)


def test_the_first_failure_ends_a_run_that_asks_for_it(disk: Disk) -> None:
    disk.refusals = 1
    with pytest.raises(StorageError, match="No space left.* because of --exit-on-failed-save"):
        save(run_at(4, exit_on_failed_save=True))
    disk.refusals = 1
    with pytest.raises(StorageError, match="1 consecutive saves failed .--max-failed-saves 1"):
        save(run_at(4, max_failed_saves=1))


def test_non_consecutive_failures_do_not_accumulate(disk: Disk) -> None:
    run = run_at(2)
    for step in (2, 4, 6, 8):
        run.progress = Progress(step, 8 * step, 80 * step)
        disk.refusals = 1 if step in (2, 6) else 0
        run.saving.save(run)
    assert disk.steps == [4, 8]


def test_other_errors_are_not_treated_as_storage_failures(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **keywords: Any) -> None:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(saving, "save_checkpoint", broken)
    with pytest.raises(ValueError, match="a mistake of ours"):
        save(run_at(4))


def test_the_record_contains_all_state_except_tensors(disk: Disk) -> None:
    assert record_of(run_at(4)).to_json() == {
        "progress": {"step": 4, "consumed_samples": 32, "consumed_tokens": 320, "skipped_steps": 0},
        "optimizer_updates": 3,
        "loss_scale": {"cur_scale": 2.0},
        "config": {"config": 1},
        "data_plan": PLAN.to_json(),
        "data": {"of": "data"},
        "tokenizer": {"fingerprint": "f", "vocab_size": 600, "name": "GPT2BPE", "eod_id": 0},
        "program": {"version": __version__},
        "recent": {"loss": [2.5]},
        "run_id": "0123456789abcdef",
        "finetuned_from": {"run_id": "fedcba9876543210", "step": 3},
        "passed_batches": [{"step": 2, "first_sample": 8, "last_sample": 15}],
        "validation_loss": 2.25,
        "parts": {"counter": {"seen": 3}},
    }


class Writer:
    """A stand-in for the thread: its saves end as they are told to, when somebody waits or `end` is called."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.outcomes: list[SaveOutcome] = []
        self.next_failure: Exception | None = None
        self.heard = True
        self.stall_seconds = 0.0

    def start_save(self, step: int, pieces: Any, record: Any) -> None:
        self.began.append(step)

    def wait(self) -> None:
        if len(self.began) > len(self.outcomes):
            self.end()

    def end(self) -> None:
        self.outcomes.append(SaveOutcome(self.began[-1], self.next_failure, 0.1))
        self.heard = False

    def take_outcome(self) -> SaveOutcome | None:
        if not self.outcomes or self.heard:
            return None
        self.heard = True
        return self.outcomes[-1]


@pytest.fixture
def run(disk: Disk) -> Any:
    """A single rank that saves in the background."""
    return run_at(2, writer=Writer())


def test_only_what_is_committed_counts_as_saved(run: Any, disk: Disk) -> None:
    run.saving.save(run)
    run.saving.note_outcome(run)
    assert (run.saving.writer.began, run.saving.saved_step, disk.steps) == ([2], None, [])
    run.saving.writer.end()
    run.saving.note_outcome(run)
    assert run.saving.saved_step == 2


def test_a_save_waits_for_the_one_before(run: Any, disk: Disk) -> None:
    run.saving.save(run)
    run.progress = Progress(4, 32, 320)
    run.saving.save(run)
    assert (run.saving.writer.began, run.saving.saved_step) == ([2, 4], 2)
    run.saving.save(run, must_succeed=True)
    assert (run.saving.writer.began, run.saving.saved_step, disk.steps) == ([2, 4], 4, [])
    run.progress = Progress(5, 40, 400)
    run.saving.save(run, must_succeed=True)
    assert (run.saving.writer.began, run.saving.saved_step, disk.steps) == ([2, 4], 5, [5])


def test_a_save_in_the_background_that_fails_once(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run.saving.writer.next_failure = StorageError("cannot write x: No space left on device.")
    run.saving.save(run)
    run.saving.writer.end()
    run.saving.note_outcome(run)
    run.saving.note_outcome(run)
    assert capsys.readouterr().err.count("Training continues; the next attempt is at the next") == 1
    assert (run.saving.saved_step, run.saving.failed, run.saving.failure) == (None, 1, None)
    run.saving.writer.next_failure = None
    run.saving.save(run)
    run.saving.writer.end()
    run.saving.note_outcome(run)
    assert (run.saving.saved_step, run.saving.failed) == (2, 0)


def test_the_last_failure_in_the_background_is_raised(run: Any, disk: Disk) -> None:
    run.saving.writer.next_failure = StorageError("cannot write x: No space left on device.")
    for _ in range(3):
        assert run.saving.failure is None
        run.saving.save(run)
        run.saving.writer.end()
        run.saving.note_outcome(run)
    assert "3 consecutive saves failed (--max-failed-saves 3)" in str(run.saving.failure)
    run.stopping.verdict = StopVerdict.FAILED_SAVE
    with pytest.raises(StorageError, match="cannot write x"):
        run.saving.trained(run)
    with pytest.raises(StorageError, match="cannot write x"):
        run.saving.save(run)
    run.saving.save(run, must_succeed=True)  # a run that stops for another reason tries once more
    assert (disk.steps, run.saving.saved_step) == ([2], 2)


@pytest.mark.parametrize("failure", [NumericsError("tensor a holds nan"), CheckpointError("lost"), ValueError("bug")])
def test_any_other_failure_in_the_background_ends_the_run_at_once(run: Any, failure: Exception) -> None:
    run.saving.writer.next_failure = failure
    run.saving.save(run)
    run.saving.writer.end()
    run.saving.note_outcome(run)
    assert run.saving.failure is failure
    for must_succeed in (False, True):
        with pytest.raises(type(failure), match=str(failure)):
            run.saving.save(run, must_succeed=must_succeed)


def test_what_is_saved_follows_flags_and_rank(disk: Disk) -> None:
    save(run_at(4, save=None, save_interval=None), must_succeed=True)
    loaded = run_at(4)
    loaded.saving.saved_step = 4
    save(loaded)
    assert disk.calls == []
    save(run_at(4, no_save_optim=True))
    assert disk.calls[0][1] == ("pieces", False)
    assert record_of(run_at(4, rank=1)).data == {}, "one rank reads the data files"
    disk.refusals = 1
    with pytest.raises(StorageError, match="cannot write checkpoints: No space left"):
        save(run_at(4), must_succeed=True)
