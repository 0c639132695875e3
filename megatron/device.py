"""CPU or CUDA: the device a process computes on, what it supports, and access to environment variables.

Only this file and `kernels/` call `torch.cuda`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from megatron.errors import LaunchError

_HOST_REGISTER_PORTABLE = 1

Result = TypeVar("Result")


def environment(name: str, default: str | None = None) -> str | None:
    """Value of an environment variable; an empty one counts as unset."""
    return os.environ.get(name) or default


def device_type() -> str:
    """`"cuda"` if a GPU is usable and `DS_ACCELERATOR` is not `cpu`, else `"cpu"`."""
    if environment("DS_ACCELERATOR") == "cpu":
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_accelerator() -> None:
    """Tells DeepSpeed which device to use, so that it neither guesses nor warns; call it before importing DeepSpeed."""
    os.environ.setdefault("DS_ACCELERATOR", device_type())


def device_count() -> int:
    """How many devices this process could choose from; 1 on CPU."""
    return torch.cuda.device_count() if device_type() == "cuda" else 1


def local_device(local_rank: int, *, one_device_per_process: bool = False) -> torch.device:
    """Chooses this process's device and makes it the current one.

    Args:
        local_rank: number of this process on its node.
        one_device_per_process: whether a launcher may expose only its own GPU to each process, so that a single
            visible GPU is the right one.

    Raises:
        LaunchError: more processes on this node than GPUs.
    """
    if device_type() == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if one_device_per_process and count == 1:
        local_rank = 0
    if local_rank >= count:
        raise LaunchError(
            f"Local rank {local_rank} has no GPU of its own: {count} visible on this node (LOCAL_RANK={local_rank}, "
            f"CUDA_VISIBLE_DEVICES={environment('CUDA_VISIBLE_DEVICES', 'not set')}). Start at most {count} processes "
            f"per node, or set DS_ACCELERATOR=cpu to compute on the CPU."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def use_on_this_thread(target: torch.device) -> None:
    """Makes a device the current one of a new thread, which begins on the first GPU and would take memory there."""
    if target.type == "cuda":
        torch.cuda.set_device(target)


@contextlib.contextmanager
def as_local_rank(target: torch.device) -> Iterator[None]:
    """Has the variables for the local rank give the number of a GPU, which DeepSpeed and Open MPI's check read there.

    They differ where a launcher shows each process only its own GPU.
    """
    names = [name for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") if name in os.environ]
    before = {name: os.environ[name] for name in names}
    if target.index is not None:
        os.environ.update(dict.fromkeys(names, str(target.index)))
    try:
        yield
    finally:
        os.environ.update(before)


def current_device() -> torch.device:
    """The device chosen by `local_device`."""
    return torch.device("cuda", torch.cuda.current_device()) if device_type() == "cuda" else torch.device("cpu")


def device_name() -> str:
    """Name of the device, for reports."""
    return torch.cuda.get_device_name() if device_type() == "cuda" else "cpu"


def default_backend() -> str:
    """The torch.distributed backend that fits the device: `nccl` or `gloo`."""
    return "nccl" if device_type() == "cuda" else "gloo"


def supports_fp16() -> bool:
    """Whether training in float16 is possible; on CPU DeepSpeed refuses it."""
    return device_type() == "cuda"


def supports_bf16() -> bool:
    """Whether training in bfloat16 is possible."""
    return device_type() == "cpu" or torch.cuda.is_bf16_supported()


def supports_fp8() -> bool:
    """Whether the GPU multiplies matrices in the float8 formats of NVIDIA's (Ada, Hopper and later)."""
    return device_type() == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)


def synchronize() -> None:
    """Waits until the device has finished all queued work."""
    if device_type() == "cuda":
        torch.cuda.synchronize()


def peak_memory_allocated_bytes() -> int:
    """The most bytes allocated to tensors on the GPU so far; 0 on CPU."""
    return torch.cuda.max_memory_allocated() if device_type() == "cuda" else 0


def peak_memory_bytes() -> int:
    """The most memory that this process has held: allocated to tensors on the GPU, or resident on a CPU.

    Source: getrusage(2); macOS counts bytes, Linux KiB.
    """
    if device_type() == "cuda":
        return peak_memory_allocated_bytes()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Stopwatch:
    """Adds up how long parts of a step take, without waiting for a GPU.

    There the time between two events of the current stream counts: what the stream did in between, or waited for.
    Nothing is counted, or kept, before `start` and after `take`.
    """

    def __init__(self) -> None:
        self._is_cuda = device_type() == "cuda"
        self._elapsed: Elapsed | None = None

    def start(self) -> None:
        self._elapsed = Elapsed()

    @contextlib.contextmanager
    def running(self, kind: str = "") -> Iterator[None]:
        """Counts what the block takes, as time of this kind."""
        elapsed = self._elapsed
        if elapsed is None:
            yield
            return
        began = self._now()
        try:
            yield
        finally:
            elapsed.parts.append((kind, began, self._now()))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Counts nothing of what the block does: work that a graph repeats later leaves no times."""
        elapsed, self._elapsed = self._elapsed, None
        try:
            yield
        finally:
            self._elapsed = elapsed

    def take(self) -> Elapsed:
        """What has been counted since `start`; counting ends."""
        elapsed, self._elapsed = self._elapsed, None
        return Elapsed() if elapsed is None else elapsed

    def _now(self) -> float | torch.cuda.Event:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Elapsed:
    """The parts that a `Stopwatch` has counted."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    def seconds(self, kind: str | None = None) -> float:
        """The total seconds of the parts of one kind, or of all parts; waits until a GPU has finished them."""
        total = 0.0
        for part_kind, began, ended in self.parts:
            if kind not in (None, part_kind):
                continue
            if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
                ended.synchronize()
                total += began.elapsed_time(ended) / 1e3
            elif isinstance(began, float) and isinstance(ended, float):
                total += ended - began
        return total


def copy_to_device(array: np.ndarray, target: torch.device) -> torch.Tensor:
    """Copies an array to a device; to a GPU through pinned memory, asynchronously. On a CPU it shares its memory."""
    tensor = torch.from_numpy(array)
    if target.type != "cuda":
        return tensor if target.type == "cpu" else tensor.to(target)
    return tensor.pin_memory().to(target, non_blocking=True)


class HostCopy:
    """An asynchronous copy of a tensor to the host; reading it waits until the values have arrived."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = tensor.detach()
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> torch.Tensor:
        """The values, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values


class HostCopies:
    """Copies of tensors to host memory, made by another thread during the computation; reused for each set.

    On a GPU the copies have a stream of their own, so that they run in parallel with the kernels that are queued later.
    """

    def __init__(self, source: torch.device) -> None:
        self._stream = torch.cuda.Stream(source) if source.type == "cuda" else None
        self._ready: torch.cuda.Event | None = None
        self._done: torch.cuda.Event | None = None

    def mark(self) -> None:
        """Says that what has been queued so far computes the values to be copied; on the thread that computes."""
        self._done = None
        if self._stream is not None:
            self._ready = torch.cuda.current_stream(self._stream.device).record_event()

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies flat tensors that are on the CPU, and queues the copies of those that are not.

        One thread copies host memory as fast as several.

        Args:
            pairs: target, in the memory of `host_buffer`, and source, which keeps its values until `hold_device`.
        """
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None and self._ready is not None:
                self._stream.wait_event(self._ready)
            for target, source in pairs:
                if source.is_cuda or not source.is_contiguous():
                    target.copy_(source, non_blocking=True)
                else:  # NumPy copies on this thread alone, where torch would start more
                    np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
            if self._stream is not None:
                self._done = self._stream.record_event()

    def hold_device(self) -> None:
        """Makes work that is queued from now on wait for the copies; on the thread that computes, after `copy`."""
        if self._done is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)

    def wait(self) -> None:
        """Waits until the copies have arrived."""
        if self._done is not None:
            self._done.synchronize()


class CapturedWork(Protocol):
    """Work that can be repeated on the memory it was captured with."""

    def replay(self) -> None:
        """Queues the work."""

    def release(self) -> None:
        """Frees what repeating it takes, once it is not needed any more."""


class CaptureError(RuntimeError):
    """A capture that failed, here or on a rank that takes part in its messages; the device is as it was before."""


class GraphCapturer:
    """Captures work of the GPU as CUDA graphs: kernels on fixed addresses, queued in one call.

    Of the graphs that share memory one may run at a time, and what it leaves lasts until the next one runs.

    Args:
        stopwatch: counts messages, if there is one; not those of graphs.
        any_failed: given whether a capture failed on this rank, returns whether it did on any of the ranks that
            exchange messages within the work; collective over these.
    """

    def __init__(
        self,
        target: torch.device,
        stopwatch: Stopwatch | None = None,
        any_failed: Callable[[bool], bool] = bool,
    ) -> None:
        self._stream = torch.cuda.Stream(target)
        self._stopwatch = stopwatch
        self._any_failed = any_failed

    def new_memory(self) -> Any:
        """Memory for graphs to share; not to be used again once all of them were released, or a capture has failed."""
        return torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], Result]) -> Result:
        """Does the work on the stream of the captures, for which libraries allocate what they need there."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        return result

    def capture(self, work: Callable[[], Result], memory: Any) -> tuple[CapturedWork, Result]:
        """Captures the work without doing it; the result gets its values when the graph runs.

        Other threads may go on using the GPU.

        Args:
            memory: of `new_memory`, for graphs that run in the order of their captures.

        Raises:
            CaptureError: the work cannot be captured.
        """
        failure: RuntimeError | None = None
        captured: list[tuple[CapturedWork, Result]] = []
        untimed = contextlib.nullcontext() if self._stopwatch is None else self._stopwatch.paused()
        try:
            with untimed:
                captured.append(self._captured(work, memory))
        except RuntimeError as caught:
            failure = caught
        if self._any_failed(failure is not None):
            for graph, _ in captured:
                graph.release()
            reason = "a capture failed on another rank" if failure is None else str(failure).strip().partition("\n")[0]
            raise CaptureError(reason) from failure
        return captured[0]

    def _captured(self, work: Callable[[], Result], pool: Any) -> tuple[CapturedWork, Result]:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the memory of a graph is not shared with other work
        graph, is_ended = torch.cuda.CUDAGraph(), False
        with torch.cuda.stream(self._stream), _nodes_follow_the_capture():
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = work()
                finally:
                    graph.capture_end()
                    is_ended = True
            except RuntimeError as failure:
                graph.reset()
                if not is_ended:
                    _abandon(pool)
                # Once a capture is invalid, each later call only says so: what was wrong is what happened first.
                first = failure.__context__
                raise (first if isinstance(first, RuntimeError) else failure) from None
        return _Graph(graph), result


def _abandon(pool: Any) -> None:
    """Undoes what torch leaves of a capture that could not be ended.

    It stays open in the allocator, whose next `empty_cache` would refuse it, and in the generator of random numbers,
    which would refuse to draw outside a capture.
    """
    index = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # the allocator had not begun with it
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


@contextlib.contextmanager
def _nodes_follow_the_capture() -> Iterator[None]:
    """Has nodes of autograd that were made on another stream run on that of the capture, where torch can (2.13)."""
    override = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)
    if override is None:
        yield
        return
    override(True)
    try:
        yield
    finally:
        override(False)


class _Graph:
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()

    def release(self) -> None:
        synchronize()  # it may still run
        self._graph.reset()


def host_buffer(size_bytes: int, source: torch.device) -> torch.Tensor:
    """Host memory for copies of tensors of a device, page-locked where that is a GPU.

    Memory of the process is locked rather than asked of torch's allocator of pinned memory, which takes the next power
    of two and keeps it: 64 GiB for 33.

    Shapes: `[size_bytes]` uint8.

    Raises:
        MemoryError: the system does not give that much, or does not lock it.

    Source: torch, distributed/_state_dict_utils.py, `_create_cpu_state_dict`; CUDA runtime API, cudaHostRegister.
    """
    try:
        buffer = torch.empty(size_bytes, dtype=torch.uint8)
    except RuntimeError as failure:  # DefaultCPUAllocator: can't allocate memory
        raise MemoryError(f"the system does not give {size_bytes} bytes of host memory") from failure
    if source.type == "cuda" and size_bytes:
        runtime, address = torch.cuda.cudart(), buffer.data_ptr()
        status = int(runtime.cudaHostRegister(address, size_bytes, _HOST_REGISTER_PORTABLE))
        if status != 0:
            raise MemoryError(f"CUDA does not lock {size_bytes} bytes of host memory (cudaHostRegister: {status})")
        weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address).atexit = False
    return buffer


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that torch's own random operations on `device` draw from."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.init()
        return torch.cuda.default_generators[index]
    return torch.default_generator
