"""What stands for CUDA graphs where there is no GPU: operations that are recorded, and run again on the same memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.device import CapturedWork, GraphCapturer
from megatron.engine.cuda_graphs import any_failed_on
from megatron.parallel.mesh import ParallelMesh

Result = TypeVar("Result")
Memory = dict[int, torch.UntypedStorage]


class Tape(TorchDispatchMode):
    """Records the operations of a block of code; `replay` runs none of the block's Python code again.

    As in a capture, nothing of the block may write to memory that was there before.

    Args:
        made: the memory that this block, and those before it that shared it, have allocated.

    Attributes:
        is_released: whether `release` has been called.
    """

    def __init__(self, made: Memory) -> None:
        super().__init__()
        self.is_released = False
        self._calls: list[tuple[Any, Any, Any, dict[int, torch.Tensor]]] = []
        self._made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and _is_waiting():
            return func(*args, **kwargs)  # gloo copies what has arrived, and does so again when a replay waits
        before = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        results = func(*args, **kwargs)
        outputs = list(_tensors(results))
        if func._schema.is_mutable:
            written = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
            outside = [each.shape for each in written if each.untyped_storage()._cdata not in self._made]
            assert not outside, f"{func} writes to memory of shapes {outside} that the capture did not allocate"
        made = {place: x for place, x in enumerate(outputs) if x.untyped_storage()._cdata not in before}
        self._made.update((each.untyped_storage()._cdata, each.untyped_storage()) for each in made.values())
        self._calls.append((func, args, kwargs, made))
        return results

    def spoil(self) -> None:
        """Leaves no number where the block wrote one: a capture computes nothing."""
        with torch.no_grad():
            for *_, made in self._calls:
                for tensor in made.values():
                    if tensor.is_floating_point():
                        with torch.autograd._unsafe_preserve_version_counter(tensor):  # a backward pass may follow
                            tensor.fill_(torch.nan)

    def replay(self) -> None:
        """Runs the operations again; each writes its results where it wrote them first."""
        assert not self.is_released
        with torch.no_grad():
            for func, args, kwargs, made in self._calls:
                results = func(*args, **kwargs)
                for message in (leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.ScriptObject)):
                    Work.unbox(message).wait()
                outputs = list(_tensors(results))
                for place, tensor in made.items():
                    tensor.copy_(outputs[place])

    def release(self) -> None:
        self.is_released = True


class TapeCapturer(GraphCapturer):
    """Captures tapes, which it lists in order."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.warm_ups = 0
        self._stopwatch, self._any_failed = None, bool

    def warm_up(self, work: Callable[[], Result]) -> Result:
        self.warm_ups += 1
        return work()

    def new_memory(self) -> Memory:
        return {}

    def new_tape(self, memory: Memory) -> Tape:
        return Tape(memory)

    def _captured(self, work: Callable[[], Result], pool: Memory) -> tuple[CapturedWork, Result]:
        tape = self.new_tape(pool)
        with tape:
            result = work()
        tape.spoil()
        self.tapes.append(tape)
        return tape, result


REFUSED = "CUDA error: operation not permitted when stream is capturing"


class _FailingTape(Tape):
    def __init__(self, made: Memory, operation: int) -> None:
        super().__init__(made)
        self._left = operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError(f"{REFUSED}\nCompile with TORCH_USE_CUDA_DSA")
        return super().__torch_dispatch__(func, types, args, kwargs)


class FailingCapturer(TapeCapturer):
    """Captures tapes until one of them fails.

    Args:
        capture: number of the capture that fails, from 0; None for none.
        operation: number of the operation in it that is refused; None if the capture cannot be ended.
    """

    def __init__(self, capture: int | None, operation: int | None) -> None:
        super().__init__()
        self._failing, self._operation = capture, operation

    def agree_on(self, mesh: ParallelMesh) -> None:
        self._any_failed = any_failed_on(mesh)

    def new_tape(self, memory: Memory) -> Tape:
        if len(self.tapes) == self._failing and self._operation is not None:
            return _FailingTape(memory, self._operation)
        return super().new_tape(memory)

    def _captured(self, work: Callable[[], Result], pool: Memory) -> tuple[CapturedWork, Result]:
        captured = super()._captured(work, pool)
        if len(self.tapes) - 1 == self._failing:
            self.tapes.pop().release()
            raise RuntimeError(REFUSED)
        return captured


def _is_waiting() -> bool:
    """Whether what runs now is called by code that waits for a message."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_name in ("wait", "wait_for")


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
