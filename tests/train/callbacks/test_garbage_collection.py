"""Python's garbage collector in a run: at chosen steps and after an evaluation, and never in between."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

from megatron.train.callbacks.garbage_collection import GarbageCollection


def setup_with(interval_steps: int) -> Any:
    return SimpleNamespace(config=SimpleNamespace(kernels=SimpleNamespace(manual_gc_interval=interval_steps)))


def test_garbage_is_collected_at_chosen_steps_only() -> None:
    collected: list[int] = []
    run: Any = SimpleNamespace(progress=SimpleNamespace(step=0))
    watching = lambda phase, info: collected.append(run.progress.step) if phase == "start" else None  # noqa: E731
    callback = GarbageCollection.of(setup_with(4))
    assert callback is not None
    before = gc.get_threshold()
    callback.opened(run)
    gc.callbacks.append(watching)
    try:
        assert gc.get_freeze_count() > 0
        for run.progress.step in range(1, 10):
            cycles = [[] for _ in range(2 * before[0])]  # the collector would run at least twice a step
            for cycle in cycles:
                cycle.append(cycle)
            callback.after_step(run, step=None)  # type: ignore[arg-type]
        callback.at_evaluation(run, evaluation=None)  # type: ignore[arg-type]
    finally:
        gc.callbacks.remove(watching)
        callback.close(run, None)
    assert collected == [4, 8, 9]
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_without_an_interval_python_decides() -> None:
    assert GarbageCollection.of(setup_with(0)) is None
