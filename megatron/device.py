"""The device of a process, CPU or CUDA, its capabilities, and access to environment variables.

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
    """The value of an environment variable; an empty one counts as unset."""
    return os.environ.get(name) or default


def device_type() -> str:
    """`"cuda"` if a GPU is usable and `DS_ACCELERATOR` is not `cpu`, else `"cpu"`."""
    if environment("DS_ACCELERATOR") == "cpu":
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_accelerator() -> None:
    """Sets DeepSpeed's accelerator, so that it neither guesses nor warns; call it before importing DeepSpeed."""
    os.environ.setdefault("DS_ACCELERATOR", device_type())


def device_count() -> int:
    """Number of devices visible to this process; 1 on CPU."""
    return torch.cuda.device_count() if device_type() == "cuda" else 1


def local_device(local_rank: int, *, one_device_per_process: bool = False) -> torch.device:
    """Chooses this process's device and makes it the current one.

    Args:
        local_rank: local rank of this process on its node.
        one_device_per_process: the launcher may expose a single GPU to each process, which is then the right one.

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
            f"No GPU for local rank {local_rank}: {count} visible on this node (LOCAL_RANK={local_rank}, "
            f"CUDA_VISIBLE_DEVICES={environment('CUDA_VISIBLE_DEVICES', 'not set')}). Start at most {count} processes "
            f"per node, or set DS_ACCELERATOR=cpu to use the CPU."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def use_on_this_thread(target: torch.device) -> None:
    """Sets the device of a new thread, which otherwise starts on the first GPU and allocates memory there."""
    if target.type == "cuda":
        torch.cuda.set_device(target)


@contextlib.contextmanager
def as_local_rank(target: torch.device) -> Iterator[None]:
    """Sets the environment variables of the local rank to the index of a GPU, as DeepSpeed and Open MPI expect.

    The two differ if a launcher exposes a single GPU to each process.
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
    return torch.device("cuda", torch.cuda.current_device()) if device_type() == "cuda" else torch.device("cpu")


def device_name() -> str:
    return torch.cuda.get_device_name() if device_type() == "cuda" else "cpu"


def default_backend() -> str:
    """The torch.distributed backend of the device: `nccl` or `gloo`."""
    return "nccl" if device_type() == "cuda" else "gloo"


def supports_fp16() -> bool:
    return device_type() == "cuda"  # on CPU DeepSpeed refuses float16


def supports_bf16() -> bool:
    return device_type() == "cpu" or torch.cuda.is_bf16_supported()


def supports_fp8() -> bool:
    """True for GPUs with float8 matrix multiplication (Ada, Hopper and later)."""
    return device_type() == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)


def synchronize() -> None:
    """Waits until the device has finished all queued work."""
    if device_type() == "cuda":
        torch.cuda.synchronize()


def peak_memory_allocated_bytes() -> int:
    """Peak memory allocated to tensors on the GPU; 0 on CPU."""
    return torch.cuda.max_memory_allocated() if device_type() == "cuda" else 0


def peak_memory_bytes() -> int:
    """Peak memory of this process: allocated to tensors on the GPU, or resident on the CPU.

    Source: getrusage(2); macOS counts bytes, Linux KiB.
    """
    if device_type() == "cuda":
        return peak_memory_allocated_bytes()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Stopwatch:
    """Measures the time of parts of a step, without synchronizing with a GPU.

    On a GPU it measures the time between two events of the current stream, including waits of the stream. Active
    between `start` and `take`.
    """

    def __init__(self) -> None:
        self._is_cuda = device_type() == "cuda"
        self._elapsed: Elapsed | None = None

    def start(self) -> None:
        self._elapsed = Elapsed()

    @contextlib.contextmanager
    def running(self, kind: str = "") -> Iterator[None]:
        """Measures the block as time of this kind."""
        elapsed = self._elapsed
        if elapsed is None:
            yield
            return
        start = self._now()
        try:
            yield
        finally:
            elapsed.parts.append((kind, start, self._now()))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspends measurement, for work that is captured in a graph."""
        elapsed, self._elapsed = self._elapsed, None
        try:
            yield
        finally:
            self._elapsed = elapsed

    def take(self) -> Elapsed:
        """Stops and returns the times since `start`."""
        elapsed, self._elapsed = self._elapsed, None
        return Elapsed() if elapsed is None else elapsed

    def _now(self) -> float | torch.cuda.Event:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Elapsed:
    """The times measured by a `Stopwatch`."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    def seconds(self, kind: str | None = None) -> float:
        """Total seconds of the parts of one kind, or of all parts; waits until a GPU has finished them."""
        total = 0.0
        for part_kind, start, end in self.parts:
            if kind not in (None, part_kind):
                continue
            if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                end.synchronize()
                total += start.elapsed_time(end) / 1e3
            elif isinstance(start, float) and isinstance(end, float):
                total += end - start
        return total


def copy_to_device(array: np.ndarray, target: torch.device) -> torch.Tensor:
    """Copies an array to a GPU asynchronously, through pinned memory; on a CPU the tensor shares its memory."""
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
    """Copies of tensors to host memory by another thread during the computation; reusable.

    On a GPU the copies run on a separate stream, in parallel with kernels that are queued later.
    """

    def __init__(self, source: torch.device) -> None:
        self._stream = torch.cuda.Stream(source) if source.type == "cuda" else None
        self._ready: torch.cuda.Event | None = None
        self._done: torch.cuda.Event | None = None

    def mark(self) -> None:
        """Marks the queued work that computes the values to copy; called on the computing thread."""
        self._done = None
        if self._stream is not None:
            self._ready = torch.cuda.current_stream(self._stream.device).record_event()

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies flat tensors: immediately from the CPU, asynchronously from a GPU.

        Args:
            pairs: target, in the memory of `host_buffer`, and source, whose values must not change until `hold_device`.
        """
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None and self._ready is not None:
                self._stream.wait_event(self._ready)
            for target, source in pairs:
                if source.is_cuda or not source.is_contiguous():
                    target.copy_(source, non_blocking=True)
                else:  # NumPy uses this thread only: more threads would not be faster
                    np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
            if self._stream is not None:
                self._done = self._stream.record_event()

    def hold_device(self) -> None:
        """Makes later work wait for the copies; called on the computing thread, after `copy`."""
        if self._done is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)

    def wait(self) -> None:
        """Waits until the copies have arrived."""
        if self._done is not None:
            self._done.synchronize()


class CapturedWork(Protocol):
    """Captured work that can be replayed on the same memory."""

    def replay(self) -> None:
        """Queues the work."""

    def release(self) -> None:
        """Frees its resources."""


class CaptureError(RuntimeError):
    """A capture failed, here or on a rank that communicates within it; the state of the device is restored."""


class GraphCapturer:
    """Captures GPU work as CUDA graphs: kernels on fixed addresses, queued in one call.

    Of the graphs that share memory one may run at a time; its results are valid until the next one runs.

    Args:
        stopwatch: measures messages, but not those in graphs.
        any_failed: combines the failure of a capture over the ranks that communicate within the work; collective.
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
        """A memory pool for graphs; not reusable once all of them were released, or a capture has failed."""
        return torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], Result]) -> Result:
        """Runs the work on the capture stream, so that libraries allocate their resources there."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        return result

    def capture(self, work: Callable[[], Result], memory: Any) -> tuple[CapturedWork, Result]:
        """Captures the work without running it; the result gets its values when the graph runs.

        Other threads may continue to use the GPU.

        Args:
            memory: from `new_memory`, for graphs that run in the order of their captures.

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
        with torch.cuda.stream(self._stream), _autograd_on_capture_stream():
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
                # After a capture became invalid, later calls only report that: the cause is the first error.
                first = failure.__context__
                raise (first if isinstance(first, RuntimeError) else failure) from None
        return _Graph(graph), result


def _abandon(pool: Any) -> None:
    """Cleans up a capture that could not be ended.

    It would remain open in the allocator, so that the next `empty_cache` fails, and in the random number generator,
    which would refuse to draw outside a capture.
    """
    index = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # the allocator had not started it
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


@contextlib.contextmanager
def _autograd_on_capture_stream() -> Iterator[None]:
    """Runs autograd nodes created on another stream on the capture stream, if torch supports it (2.13)."""
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
        synchronize()  # it may still be running
        self._graph.reset()


def host_buffer(size_bytes: int, source: torch.device) -> torch.Tensor:
    """Host memory for copies of tensors of a device, page-locked for a GPU.

    Ordinary memory is locked instead of using torch's pinned allocator, which rounds up to a power of two and never
    frees: 64 GiB for 33.

    Shapes: `[size_bytes]` uint8.

    Raises:
        MemoryError: not enough memory, or it cannot be locked.

    Source: torch, distributed/_state_dict_utils.py, `_create_cpu_state_dict`; CUDA runtime API, cudaHostRegister.
    """
    try:
        buffer = torch.empty(size_bytes, dtype=torch.uint8)
    except RuntimeError as failure:  # DefaultCPUAllocator: can't allocate memory
        raise MemoryError(f"cannot allocate {size_bytes} bytes of host memory") from failure
    if source.type == "cuda" and size_bytes:
        runtime, address = torch.cuda.cudart(), buffer.data_ptr()
        status = int(runtime.cudaHostRegister(address, size_bytes, _HOST_REGISTER_PORTABLE))
        if status != 0:
            raise MemoryError(f"cannot lock {size_bytes} bytes of host memory (cudaHostRegister: {status})")
        weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address).atexit = False
    return buffer


def default_generator(device: torch.device) -> torch.Generator:
    """The generator of torch's random operations on `device`."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.init()
        return torch.cuda.default_generators[index]
    return torch.default_generator
