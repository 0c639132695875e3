"""The parts of a run: what it does besides training, and when each of them is called."""

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
from megatron.train.restarts.history import RestartHistory
from megatron.train.run import Run
from megatron.train.steps import TrainedStep
from megatron.train.validation import Evaluation
from megatron.train.watchdog import Watch


@dataclass(frozen=True)
class PartSetup:
    """What parts are made from, before the network is built.

    Attributes:
        watch: watches all ranks already; later it knows the run folder.
        history: the history of the run's starts; it is open on global rank 0.
        passes: the steps before which a batch is passed over, because starts of the run ended on it in NaN.
        activity: what the run shows to those who watch it; nothing is written until a part opens it.
    """

    config: RunConfig
    mesh: ParallelMesh
    tokenizer: Tokenizer
    watch: Watch = field(default_factory=Watch)
    history: RestartHistory = field(default_factory=RestartHistory)
    passes: tuple[int, ...] = ()
    activity: Activity = field(default_factory=Activity)


class Part:
    """Something that a run does besides training. A part overrides only the methods it needs.

    All but `after_save` are called in the main thread, on every rank and at the same point of the run, so that they may
    communicate. What they raise ends the run.
    """

    @classmethod
    def of(cls, setup: PartSetup) -> Part | None:
        """The part, whose flags and files it checks here; None for a run that does without it. Collective."""
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

    def entering(self, run: Run, phase: str) -> None:
        """The run enters `evaluation` or `save`, or makes progress in it."""

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
        """No step follows, and the last one is saved."""

    def close(self, run: Run, error: BaseException | None) -> None:
        """The run ends; the last part is closed first. Called once `opened` was, whether or not that raised.

        Args:
            error: what ends the run early, if anything does.
        """


class PartSequence(Part):
    """The parts of one run, each called in its turn."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self._parts = tuple(parts)

    def restore(self, engine: Engine, progress: Progress, record: Record | None) -> None:
        for part in self._parts:
            part.restore(engine, progress, record)

    @contextlib.contextmanager
    def open(self, run: Run) -> Iterator[None]:
        """Opens the parts, and closes each of them at the end."""
        with contextlib.ExitStack() as closing:
            for part in self._parts:
                closing.enter_context(_opened(part, run))
            yield

    def before_step(self, run: Run) -> None:
        for part in self._parts:
            part.before_step(run)

    def after_step(self, run: Run, step: TrainedStep) -> None:
        for part in self._parts:
            part.after_step(run, step)

    def entering(self, run: Run, phase: str) -> None:
        for part in self._parts:
            part.entering(run, phase)

    def at_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        for part in self._parts:
            part.at_evaluation(run, evaluation)

    def before_save(self, run: Run) -> None:
        for part in self._parts:
            part.before_save(run)

    def after_save(self, path: Path, mesh: ParallelMesh) -> None:
        for part in self._parts:
            part.after_save(path, mesh)

    def failed_save(self, run: Run, step: int, reason: str) -> None:
        for part in self._parts:
            part.failed_save(run, step, reason)

    def state(self, run: Run) -> Mapping[str, Any]:
        return {name: entry for part in self._parts for name, entry in part.state(run).items()}

    def trained(self, run: Run) -> None:
        for part in self._parts:
            part.trained(run)


@contextlib.contextmanager
def _opened(part: Part, run: Run) -> Iterator[None]:
    error: BaseException | None = None
    try:
        part.opened(run)
        yield
    except BaseException as failure:
        error = failure
        raise
    finally:
        part.close(run, error)
