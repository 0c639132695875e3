"""The phases of a training step, and the operations and the processor time of each."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BEFORE, FORWARD, BACKWARD, AFTER = PHASES = ("before", "forward", "backward", "after_backward")
TRANSFER = "transfer"  # messages between the stages of a pipeline
# as `Engine.on_phase` names them
_NAMED = {"forward": FORWARD, "backward": BACKWARD, "p2p": TRANSFER, "step": AFTER}

# Operations and methods of tensors that make the host wait for the device, or would on a GPU.
_WAITING_OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero")
_WAITING_METHODS = ("tolist", "cpu", "numpy")
_ENGINES = ("/deepspeed/", "/megatron/engine/")


class StepPhases:
    """Follows the phases of a step, as the code under test announces them, and the end of autograd's work.

    Attributes:
        phase: the phase now.
        seconds: processor time of each phase since the last `start`.
    """

    def __init__(self) -> None:
        self.phase = BEFORE
        self.seconds: dict[str, float] = dict.fromkeys((*PHASES, TRANSFER), 0.0)
        self._entered_at = 0.0

    def start(self) -> None:
        """Begins a step."""
        self.phase, self.seconds = BEFORE, dict.fromkeys((*PHASES, TRANSFER), 0.0)
        self._entered_at = time.process_time()

    def enter(self, name: str) -> None:
        """Begins a phase, by the name that the engine announces."""
        now = time.process_time()
        self.seconds[self.phase] += now - self._entered_at
        self.phase, self._entered_at = _NAMED[name], now

    def finish(self) -> Mapping[str, float]:
        """Ends the step; the processor time of each phase."""
        self.seconds[self.phase] += time.process_time() - self._entered_at
        return self.seconds

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Switches from "backward" to "after_backward" once autograd is done."""
        run = torch.autograd.backward

        def followed(*arguments: Any, **options: Any) -> Any:
            result = run(*arguments, **options)
            self.enter("step")
            return result

        torch.autograd.backward = followed  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.autograd.backward = run


class OperationCounter(TorchDispatchMode):
    """Counts the operations that torch dispatches, by phase; those of hooks that an engine has in the backward pass
    belong to what comes after it.

    Attributes:
        operations: how often each operation ran in each phase, by (phase, name).
        waits: the same of those for which the host would wait for a GPU, with the function that called them.
    """

    def __init__(self, phases: StepPhases) -> None:
        super().__init__()
        self.operations: Counter[tuple[str, str]] = Counter()
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self._phases = phases

    def of_phase(self, phase: str) -> int:
        """The number of operations in a phase."""
        return sum(count for (ran_in, _), count in self.operations.items() if ran_in == phase)

    def waits_of_phase(self, phase: str) -> dict[str, int]:
        """The number of host synchronizations in a phase, by operation and location."""
        return {f"{name} at {place}": count for (when, name, place), count in self.waits.items() if when == phase}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one operation and runs it."""
        name = str(func.overloadpacket).removeprefix("aten.")
        self.operations[self._phase(), name] += 1
        if name in _WAITING_OPERATIONS or _is_blocking_copy(name, args, kwargs or {}):
            self._note_wait(name)
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def counting(self) -> Iterator[OperationCounter]:
        """Counts in the block, methods of tensors that read values included."""
        methods = {name: getattr(torch.Tensor, name) for name in _WAITING_METHODS}

        def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
            def call(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
                self._note_wait(name)
                return method(tensor, *arguments, **options)

            return call

        where = torch.where

        def chosen(*arguments: Any, **options: Any) -> Any:
            if any(isinstance(each, bool | int | float) for each in arguments):
                self._note_wait("where with a number")  # which torch copies to a GPU, and waits for the copy
            return where(*arguments, **options)

        for name, method in methods.items():
            setattr(torch.Tensor, name, noted(name, method))
        torch.where = chosen
        try:
            with self:
                yield self
        finally:
            torch.where = where
            for name, method in methods.items():
                setattr(torch.Tensor, name, method)

    def _note_wait(self, name: str) -> None:
        self.waits[self._phase(), name, _place()] += 1

    def _phase(self) -> str:
        return AFTER if self._phases.phase == BACKWARD and _is_in_hook() else self._phases.phase


def _is_blocking_copy(name: str, arguments: Any, options: Mapping[str, Any]) -> bool:
    """True if an operation is a blocking copy between devices."""
    if name == "copy_":
        return arguments[0].device != arguments[1].device and not (arguments[2:] and arguments[2])
    moves = options.get("device") not in (None, getattr(arguments[0], "device", None)) if arguments else False
    return name == "_to_copy" and moves and not options.get("non_blocking", False)


def _is_in_hook() -> bool:
    """True if the present call comes from an engine's hook in autograd, not from a layer."""
    frame, is_in_engine = sys._getframe(2), False
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            return is_in_engine
        if "/torch/" not in frame.f_code.co_filename:
            is_in_engine = any(part in frame.f_code.co_filename for part in _ENGINES)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _place() -> str:
    """The nearest function outside torch and this file."""
    frame = sys._getframe(2)
    while frame.f_back is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_code.co_name}"
