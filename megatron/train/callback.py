"""Callbacks: what a run does besides training its steps, and when each of them is called."""

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
    """What callbacks are made from, before the network is built.

    Attributes:
        watch: watches all ranks already; later it knows the run folder.
        passes: the steps before which a batch is passed over, because starts of the run ended on it in NaN.
        activity: what the run shows to those who watch it; nothing is written until a callback opens it.
    """

    config: RunConfig
    mesh: ParallelMesh
    tokenizer: Tokenizer
    watch: Watch = field(default_factory=Watch)
    passes: tuple[int, ...] = ()
    activity: Activity = field(default_factory=Activity)


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        split: "valid" or "test".
        prefix: the point in training, for the log ("iteration 100").
        losses: mean loss per counted token, in nats, by group name, None for a group of which no token counts; empty if
            the split is empty.
    """

    split: str
    prefix: str
    losses: Mapping[str, float | None]


class Callback:
    """Something that a run does besides training its steps. A callback overrides only the methods it needs.

    All but `after_save`, `failed_save` and `close` are called on every rank at the same point of the run, so that they
    may communicate; all but `after_save` in the main thread. What they raise ends the run.

    The order is that of `train/build.py`: reports of steps; callbacks of companions, of `callbacks/table.py` and of the
    program; evaluating, saving and the record of starts. What is called around evaluations and saves reaches only those
    that flags and the program ask for.
    """

    @classmethod
    def of(cls, setup: CallbackSetup) -> Callback | None:
        """The callback, whose flags and files it checks here; None for a run that does without it. Collective."""
        return cls()

    def restore(self, engine: Engine, progress: Progress, record: Record | None) -> None:
        """The engine holds the weights and the data are open; nothing has been reported yet.

        Args:
            progress: at which training starts.
            record: what `state` returned is in it; None unless the run continues from a checkpoint.
        """

    def opened(self, run: Run) -> None:
        """The run is complete, and will train or evaluate."""

    def before_step(self, run: Run) -> None:
        """The next step is about to begin; its batch is not read yet."""

    def after_step(self, run: Run, step: TrainedStep) -> None:
        """A step is trained and part of the progress of the run. Its metrics may still be on the device."""

    def at_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """A split was evaluated. The training state must stay as it is."""

    def before_save(self, run: Run) -> None:
        """The state of the run is about to be copied or written."""

    def after_save(self, path: Path, mesh: ParallelMesh) -> None:
        """A checkpoint was committed. May be called from the thread that writes.

        Args:
            path: its folder.
            mesh: the groups of this thread.
        """

    def failed_save(self, run: Run, step: int, reason: str) -> None:
        """The file system refused the checkpoint of a step."""

    def state(self, run: Run) -> Mapping[str, Any]:
        """What a checkpoint keeps for `restore`, as JSON: fields of `Record`, or entries of its `parts` by any other
        name.
        """
        return {}

    def trained(self, run: Run) -> None:
        """No step follows; the last checkpoint is about to be saved."""

    def finished(self, run: Run) -> None:
        """All samples are consumed and the last checkpoint is saved; or the run only evaluates. The final evaluations
        follow.
        """

    def close(self, run: Run, error: BaseException | None) -> None:
        """The run ends; the last callback is closed first. Called once `opened` was, whether or not that raised.

        Args:
            error: what ends the run early, if anything does.
        """


class CallbackList(Callback):
    """The callbacks of one run, each called in its turn."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def restore(self, engine: Engine, progress: Progress, record: Record | None) -> None:
        for callback in self._callbacks:
            callback.restore(engine, progress, record)

    @contextlib.contextmanager
    def open(self, run: Run) -> Iterator[None]:
        """Opens the callbacks, and closes each of them at the end."""
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
