"""A callback of a run that no file of `megatron/` knows, and how large what calls the callbacks may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from megatron.checkpoint import read_record
from megatron.config import Program
from megatron.config.parse import parse
from megatron.errors import DataError, ExitCode
from megatron.train.build import open_run
from megatron.train.callback import Callback, CallbackList, CallbackSetup
from megatron.train.loop import run_to_end
from megatron.train.run import Run
from megatron.train.signals import StopSignals
from tests.helpers.tiny_run import TinyCorpus, write_tiny_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


def noting_callback(events: list[Any]) -> type[Callback]:
    """A callback that notes all it sees, and counts the steps of all starts of the run."""

    class Noting(Callback):
        steps = 0

        @classmethod
        def of(cls, setup: CallbackSetup) -> Callback | None:
            events.append("made")
            return cls() if setup.config.optim.train_iters else None

        def restore(self, engine: Any, progress: Any, record: Any) -> None:
            self.steps = 0 if record is None else record.parts["noting"]["steps"]
            events.append(("restore", progress.step, self.steps))

        def opened(self, run: Run) -> None:
            events.append(("opened", run.progress.step))

        def before_step(self, run: Run) -> None:
            events.append(("before", run.progress.step))

        def after_step(self, run: Run, step: Any) -> None:
            self.steps += 1
            events.append(("after", run.progress.step, step.progress == run.progress))

        def at_evaluation(self, run: Run, evaluation: Any) -> None:
            events.append((evaluation.split, evaluation.prefix, list(evaluation.losses)))

        def before_save(self, run: Run) -> None:
            events.append(("before_save", run.progress.step))

        def after_save(self, path: Path, mesh: Any) -> None:
            events.append(("after_save", path.name))

        def state(self, run: Run) -> dict[str, Any]:
            return {"noting": {"steps": self.steps}}

        def trained(self, run: Run) -> None:
            events.append("trained")

        def finished(self, run: Run) -> None:
            events.append("finished")

        def close(self, run: Run, error: BaseException | None) -> None:
            events.append(("close", error))

    return Noting


def train(flags: list[str], events: list[Any]) -> int:
    """Trains as a program does that brings this callback."""
    return pretrain_gpt.train(flags, Program(callbacks=lambda: [noting_callback(events)]))


def test_a_callback_sees_every_event_in_order_and_continues(corpus: TinyCorpus, tmp_path: Path) -> None:
    flags = corpus.flags("--no-async-save", folder=tmp_path, train_iters=4, lr_decay_iters=4, eval_interval=2)
    events: list[Any] = []
    assert train([*flags, "--exit-interval", "2", "--save-interval", "100"], events) == ExitCode.DONE
    saved = ["trained", ("before_save", 2), ("after_save", "iter_0000002")]
    assert events == [
        *("made", ("restore", 0, 0), ("opened", 0)),
        *(("before", 0), ("after", 1, True), ("before", 1), ("after", 2, True)),
        *(("valid", "iteration 2", ["valid"]), *saved),
        ("close", None),
    ]
    assert read_record(tmp_path / "checkpoints/iter_0000002")["parts"] == {"noting": {"steps": 2}}
    events.clear()
    assert train([*flags, "--save-interval", "3"], events) == ExitCode.DONE
    assert events[:3] == ["made", ("restore", 2, 2), ("opened", 2)]
    last = read_record(tmp_path / "checkpoints/iter_0000004")
    assert last["parts"] == {"noting": {"steps": 4}}
    assert events[-4:-2] == ["finished", ("valid", "the end of training for val data", ["valid"])]
    assert events[-1] == ("close", None)


def test_a_checkpoint_of_a_run_without_such_a_callback_is_as_ever(corpus: TinyCorpus, tmp_path: Path) -> None:
    with open_run(parse(corpus.flags(folder=tmp_path, train_iters=1, save_interval=1)), StopSignals()) as (
        run,
        callbacks,
    ):
        assert run_to_end(run, callbacks) is ExitCode.DONE
    assert "parts" not in read_record(tmp_path / "checkpoints/iter_0000001")


def test_every_callback_is_closed_with_what_ends_the_run() -> None:
    events: list[Any] = []

    class Closing(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def opened(self, run: Run) -> None:
            if self.name == "c":
                raise DataError("no data")

        def close(self, run: Run, error: BaseException | None) -> None:
            events.append((self.name, str(error)))

    run: Any = None
    with pytest.raises(DataError), CallbackList(map(Closing, "abcd")).open(run):
        events.append("open")
    assert events == [("c", "no data"), ("b", "no data"), ("a", "no data")]


def test_what_ends_a_run_is_recorded_before_its_callbacks_are_closed(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Closing may wait for other ranks, and a scheduler does not wait for that."""
    seen: list[str] = []

    class Failing(Callback):
        def after_step(self, run: Run, step: Any) -> None:
            raise DataError("a bad callback")

        def close(self, run: Run, error: BaseException | None) -> None:
            seen.extend(path.read_text().splitlines()[-1] for path in (history, events))

    history, events = tmp_path / "checkpoints/history.jsonl", tmp_path / "run/events.jsonl"
    with pytest.raises(DataError, match="a bad callback"):
        pretrain_gpt.train(corpus.flags(folder=tmp_path, train_iters=2), Program(callbacks=lambda: [Failing]))
    ends = [json.loads(line) for line in seen]
    assert [(end["code"], end["text"]) for end in ends] == [(ExitCode.DATA, "a bad callback")] * 2
    assert [history.read_text().splitlines()[-1], events.read_text().splitlines()[-1]] == seen
