"""Runs CUDA kernels of `csrc/ops` on a CPU and says what is wrong with them.

    with emulator.launch("norm", order="random") as run:
        x, y = run.input(tensor, shift=1), run.output(tensor)
        run.call("megatron_norm_forward", y, x, rows, columns, torch.bfloat16, None)
    assert y.tensor() ...

There are two builds. *checked* checks every access to memory: bounds, uninitialised reads, races, writes to inputs,
alignment, undefined arithmetic. *plain* is faster, for large shapes, and finds what reaches an inaccessible page or
damages what lies around a buffer. Both find divergent barriers and warp operations, and deadlocks. A block that ends
with diagnoses raises `AssertionError`, unless it was opened with `expects_diagnoses=True`.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from tests.kernels.simt.harness import builds
from tests.kernels.simt.harness.builds import Change
from tests.kernels.simt.harness.diagnoses import as_sentences
from tests.kernels.simt.harness.signatures import Parameter, read_signatures

ORDERS = {"forward": 0, "reverse": 1, "random": 2}
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Buffer:
    """Memory that kernels can reach, with the values of a tensor."""

    def __init__(self, run: Run, like: torch.Tensor, shift: int, kind: str) -> None:
        self.run, self.kind, self.name = run, kind, ""
        self.shape, self.dtype, self.elements = like.shape, like.dtype, like.numel()
        self.bytes = self.elements * like.element_size()
        self.address: int = run.runtime.simt_allocate(self.bytes, like.element_size(), shift * like.element_size())
        if not self.address:
            raise MemoryError(f"no room for a buffer of {self.bytes} bytes")
        if kind != "output":
            ctypes.memmove(self.address, like.contiguous().data_ptr(), self.bytes)
        self._kept: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """A copy of what is in the buffer, or was when the run ended."""
        if self._kept is not None:
            return self._kept.clone()
        values = torch.empty(self.shape, dtype=self.dtype)
        ctypes.memmove(values.data_ptr(), self.address, self.bytes)
        return values

    def describe(self, name: str) -> None:
        """Gives the buffer the name of the parameter that it is passed for first."""
        self.name = self.name or name
        flags = int(self.kind != "output"), int(self.kind == "input")
        self.run.runtime.simt_describe(self.address, self.name.encode(), *flags)

    def release(self) -> None:
        """Keeps the values and gives the memory back, which is checked for writes around it."""
        self._kept = self.tensor()
        self.describe("a buffer that was not passed")
        if self.run.is_checked and self.kind == "output" and self.run.is_complete:
            self._report_unwritten()
        self.run.runtime.simt_free(self.address)

    def _report_unwritten(self) -> None:
        first = ctypes.c_size_t()
        count = self.run.runtime.simt_count_unwritten(self.address, ctypes.byref(first))
        if count:
            elements = f"{count} of {self.elements} elements of {self.name}"
            self.run.diagnoses.append(f"unwritten: {elements} were never written, the first at {first.value}")


class Run:
    """Buffers and launches that belong together, and what was found while they ran."""

    def __init__(self, source: Path, build: str, change: Change | None) -> None:
        self.runtime, self.is_checked, self.is_complete = _runtime(), build == "checked", True
        self.path = builds.kernels(source, build, change)
        self.library = _load(self.path)
        self.signatures = read_signatures(source)
        self.buffers: list[Buffer] = []
        self.diagnoses: list[str] = []

    def input(self, values: torch.Tensor, shift: int = 0) -> Buffer:
        """A buffer that kernels may only read, `shift` elements behind an address as aligned as a new tensor's."""
        return self._buffer(values, shift, "input")

    def inout(self, values: torch.Tensor, shift: int = 0) -> Buffer:
        """A buffer that has values and may be written."""
        return self._buffer(values, shift, "inout")

    def output(self, like: torch.Tensor | Sequence[int], dtype: torch.dtype | None = None, shift: int = 0) -> Buffer:
        """A buffer without values, of the shape of a tensor or of the given one; kernels must write all of it."""
        if not isinstance(like, torch.Tensor):
            like = torch.empty(tuple(like), dtype=dtype or torch.float32)
        return self._buffer(like if dtype is None else like.to(dtype), shift, "output")

    def scratch(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Buffer:
        """A buffer without values that kernels may leave unwritten in part, but not read there."""
        buffer = self.output(shape, dtype)
        buffer.kind = "scratch"
        return buffer

    def addresses(self, buffers: Sequence[Buffer]) -> Buffer:
        """A buffer with the addresses of others."""
        return self.input(torch.tensor([buffer.address for buffer in buffers], dtype=torch.int64))

    def call(self, launcher: str, *arguments: object) -> int:
        """Calls a launcher by name; returns its CUDA error, which is a diagnosis too unless it is 0.

        Buffers and None are passed for pointers, dtypes for their codes. None is right for the stream.
        """
        if launcher not in self.signatures:
            raise ValueError(f"{launcher} is not defined in the source; it has {', '.join(self.signatures)}")
        parameters = self.signatures[launcher]
        if len(parameters) != len(arguments):
            names = ", ".join(parameter.name for parameter in parameters)
            raise ValueError(f"{launcher} takes {len(parameters)} arguments, not {len(arguments)}: {names}")
        function = getattr(self.library, launcher)
        function.restype, function.argtypes = ctypes.c_int, [parameter.type for parameter in parameters]
        converted = [_convert(parameter, value) for parameter, value in zip(parameters, arguments, strict=True)]
        error: int = function(*converted)
        self._collect()
        if error:
            self.diagnoses.append(f"error: {launcher} returned CUDA error {error}")
            self.is_complete = False
        return error

    def close(self) -> None:
        """Gives all buffers back."""
        for buffer in self.buffers:
            buffer.release()
        self._collect()

    def _buffer(self, like: torch.Tensor, shift: int, kind: str) -> Buffer:
        self.buffers.append(Buffer(self, like, shift, kind))
        return self.buffers[-1]

    def _collect(self) -> None:
        self.diagnoses += as_sentences(self.runtime.simt_take_diagnoses().decode(), self.path)


@contextmanager
def launch(
    operation: str | Path,
    build: str = "checked",
    order: str = "forward",
    seed: int = 1,
    change: Change | None = None,
    expects_diagnoses: bool = False,
) -> Iterator[Run]:
    """Opens a run of the kernels of an operation (`csrc/ops/NAME/NAME.cu`), or of another source.

    `order` is that of threads and blocks: forward, reverse, or random by `seed`.
    """
    source = operation if isinstance(operation, Path) else builds.OPERATIONS / operation / f"{operation}.cu"
    run = Run(source, build, change)
    run.runtime.simt_set_order(ORDERS[order], seed)
    try:
        yield run
    except BaseException:
        expects_diagnoses = True  # the first failure is the one to be shown
        raise
    finally:
        run.close()
        if run.diagnoses and not expects_diagnoses:
            raise AssertionError(f"{source.name}, {build}, {order}:\n" + "\n".join(run.diagnoses))


def _convert(parameter: Parameter, value: object) -> object:
    if isinstance(value, Buffer):
        if not parameter.is_pointer:
            raise TypeError(f"{parameter.name} is no pointer, but a buffer is passed for it")
        value.describe(parameter.name)
        return value.address
    if isinstance(value, torch.dtype):
        return DTYPE_CODES[value]
    if isinstance(value, ctypes.Array):  # host memory, which a launcher reads
        return ctypes.addressof(value)
    if parameter.is_pointer and value is not None:
        raise TypeError(f"{parameter.name} is a pointer; pass a buffer or None, not {value!r}")
    if isinstance(value, int) and not isinstance(value, bool) and parameter.type(value).value != value:
        raise ValueError(f"{parameter.name}={value} does not fit into a {parameter.type.__name__}")
    return value


@cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(builds.runtime()))
    library.simt_allocate.restype = ctypes.c_void_p
    library.simt_allocate.argtypes = [ctypes.c_size_t, ctypes.c_uint, ctypes.c_size_t]
    library.simt_describe.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    library.simt_count_unwritten.restype = ctypes.c_size_t
    library.simt_count_unwritten.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.simt_free.argtypes = [ctypes.c_void_p]
    library.simt_take_diagnoses.restype = ctypes.c_char_p
    library.simt_set_order.argtypes = [ctypes.c_int, ctypes.c_uint64]
    return library


@cache
def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    if hasattr(library, "simt_dump_coverage"):
        atexit.register(_discard_coverage, library)
    return library


def _discard_coverage(library: ctypes.CDLL) -> None:
    """Keeps gcov from writing at exit, into the folder in which the library was built."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(GCOV_PREFIX=folder, GCOV_PREFIX_STRIP="99")
        library.simt_dump_coverage()
