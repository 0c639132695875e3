"""Callbacks: hooks that a run calls in addition to training its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint.record import Progress, Record
from megatron.config import RunConfig
from megatron.engine.engine import Engine
from megatron.observe.activity import Activity
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.tokenizer import Tokenizer
from megatron.train.run import Run
from megatron.train.steps import TrainedStep
from megatron.train.watchdog import Watch


@dataclass(frozen=True)
class CallbackSetup:
    """The arguments of `Callback.of`, before the network is built.

    Attributes:
        watch: the watchdog, already running; its `report_folder` is set later.
        batch_skips: the steps before which a batch is skipped, because starts of the run ended on it in NaN.
        activity: writes nothing until a callback opens it.
    """

    config: RunConfig
    mesh: ParallelMesh
    tokenizer: Tokenizer
    watch: Watch = field(default_factory=Watch)
    batch_skips: tuple[int, ...] = ()
    activity: Activity = field(default_factory=Activity)


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        split: "valid" or "test".
        prefix: the point in training, for the log ("iteration 100").
        losses: mean loss per counted token, in nats, by group name; None for a group without counted tokens; empty if
            the split is empty.
    """

    split: str
    prefix: str
    losses: Mapping[str, float | None]


class Callback:
    """Base class of callbacks; override only the methods needed.

    All methods except `after_save`, `failed_save` and `close` are called on every rank at the same point of the run, so
    that they may communicate; all except `after_save` are called in the main thread. An exception ends the run.

    The order is set in `train/build.py`: step reports; callbacks of companions, of `callbacks/table.py` and of the
    program; evaluation, saving and the record of starts. The methods around evaluations and saves are called only for
    callbacks added by flags and by the program.
    """

    @classmethod
    def of(cls, setup: CallbackSetup) -> Callback | None:
        """Creates the callback and checks its flags and files; None if the run does not need it. Collective."""
        return cls()

    def restore(self, engine: Engine, progress: Progress, record: Record | None) -> None:
        """Called when the weights are loaded and the data are open, before anything is reported.

        Args:
            progress: at the start of training.
            record: contains the result of `state`; None unless the run resumes from a checkpoint.
        """

    def opened(self, run: Run) -> None:
        """Called when the run is fully built, before it trains or evaluates."""

    def before_step(self, run: Run) -> None:
        """Called before the batch of the next step is read."""

    def after_step(self, run: Run, step: TrainedStep) -> None:
        """Called after each step; its metrics may still be on the device."""

    def at_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Called after the evaluation of a split; must not modify the training state."""

    def before_save(self, run: Run) -> None:
        """Called before the state of the run is copied or written."""

    def after_save(self, path: Path, mesh: ParallelMesh) -> None:
        """Called after a checkpoint was committed, possibly from the writer thread.

        Args:
            path: its folder.
            mesh: the groups of the calling thread.
        """

    def failed_save(self, run: Run, step: int, reason: str) -> None:
        """Called when the file system refused the checkpoint of a step."""

    def state(self, run: Run) -> Mapping[str, Any]:
        """The state to save for `restore`, as JSON: fields of `Record`, or entries of its `parts`."""
        return {}

    def trained(self, run: Run) -> None:
        """Called after the last step, before the last checkpoint is saved."""

    def finished(self, run: Run) -> None:
        """Called before the final evaluations: after the last checkpoint was saved, or in a run that only evaluates."""

    def close(self, run: Run, error: BaseException | None) -> None:
        """Called at the end of the run, last callback first, if `opened` was called, even if that raised.

        Args:
            error: the exception that ends the run, if any.
        """


class CallbackList(Callback):
    """The callbacks of a run, called in order."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def restore(self, engine: Engine, progress: Progress, record: Record | None) -> None:
        for callback in self._callbacks:
            callback.restore(engine, progress, record)

    @contextlib.contextmanager
    def open(self, run: Run) -> Iterator[None]:
        with contextlib.ExitStack() as closing:
            for callback in self._callbacks:
                closing.enter_context(_opened(callback, run))
            yield

    def before_step(self, run: Run) -> None:
        for callback in self._callbacks:
            callback.before_step(run)

    def after_step(self, run: Run, step: TrainedStep) -> None:
        for callback in self._callbacks:
            callback.after_step(run, step)

    def at_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        for callback in self._callbacks:
            callback.at_evaluation(run, evaluation)

    def before_save(self, run: Run) -> None:
        for callback in self._callbacks:
            callback.before_save(run)

    def after_save(self, path: Path, mesh: ParallelMesh) -> None:
        for callback in self._callbacks:
            callback.after_save(path, mesh)

    def failed_save(self, run: Run, step: int, reason: str) -> None:
        for callback in self._callbacks:
            callback.failed_save(run, step, reason)

    def state(self, run: Run) -> Mapping[str, Any]:
        return {name: entry for callback in self._callbacks for name, entry in callback.state(run).items()}

    def trained(self, run: Run) -> None:
        for callback in self._callbacks:
            callback.trained(run)

    def finished(self, run: Run) -> None:
        for callback in self._callbacks:
            callback.finished(run)


@contextlib.contextmanager
def _opened(callback: Callback, run: Run) -> Iterator[None]:
    error: BaseException | None = None
    try:
        callback.opened(run)
        yield
    except BaseException as failure:
        error = failure
        raise
    finally:
        callback.close(run, error)
