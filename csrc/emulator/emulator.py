"""Runs CUDA kernels of `csrc/ops` on a CPU and says what is wrong with them.

    with emulator.launch("norm", order="random") as run:
        x, y = run.input(tensor, shift=1), run.output(tensor)
        run.call("megatron_norm_forward", y, x, rows, columns, torch.bfloat16, None)
    assert y.tensor() ...

There are two builds. *checked* checks every access to memory: bounds, uninitialised reads, races, writes to inputs,
alignment, undefined arithmetic. *plain* is faster, for large shapes, and finds what reaches an inaccessible page or
damages what lies around a buffer. Both find divergent barriers and warp operations, and deadlocks. A block that ends
with diagnoses raises `AssertionError`, unless it was opened with `expects_diagnoses=True`.

The last test of an operation asks what has run:

    def test_every_line_has_run(whole_file: None) -> None:
        assert emulator.unexecuted_lines("norm") == []
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from csrc.emulator.harness import builds, coverage
from csrc.emulator.harness.diagnoses import as_sentences
from csrc.emulator.harness.signatures import Parameter, read_signatures
from csrc.emulator.harness.symbols import shared_arrays

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

    def __init__(self, source: Path, build: str) -> None:
        self.runtime, self.is_checked, self.is_complete = _runtime(), build == "checked", True
        self.path = builds.kernels(source, build)
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

    def scratch(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, shift: int = 0) -> Buffer:
        """A buffer without values that kernels may leave unwritten in part, but not read there."""
        buffer = self.output(shape, dtype, shift)
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
    expects_diagnoses: bool = False,
    limit_seconds: int = 120,
) -> Iterator[Run]:
    """Opens a run of the kernels of an operation (`csrc/ops/NAME/NAME.cu`), or of another source.

    `order` is that of threads and blocks: forward, reverse, or random by `seed`. A kernel that takes more than
    `limit_seconds` of processor time is diagnosed as an endless loop.
    """
    source = _source(operation)
    run = Run(source, build)
    run.runtime.simt_set_order(ORDERS[order], seed)
    run.runtime.simt_allow_seconds(limit_seconds)
    try:
        yield run
    except AssertionError as failure:  # wrong values: the diagnoses say why
        run.close()
        _raise_diagnoses(run, source, f"{build}, {order}", expects_diagnoses, failure)
        raise
    except BaseException:
        run.close()
        raise
    run.close()
    _raise_diagnoses(run, source, f"{build}, {order}", expects_diagnoses, None)


def _raise_diagnoses(run: Run, source: Path, how: str, is_expected: bool, cause: AssertionError | None) -> None:
    if run.diagnoses and not is_expected:
        raise AssertionError(f"{source.name}, {how}:\n" + "\n".join(run.diagnoses)) from cause


def unexecuted_lines(operation: str) -> list[str]:
    """The lines of kernels and launchers in `csrc/ops/NAME` that no plain run has reached.

    Counts the runs of this process, so a test that calls it comes last in its file and uses the fixture `whole_file`.
    """
    source = _source(operation)
    path = builds.kernels(source, "plain")
    return coverage.unexecuted_lines(_load(path), path, source.parent)


def _source(operation: str | Path) -> Path:
    return operation if isinstance(operation, Path) else builds.OPERATIONS / operation / f"{operation}.cu"


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
    library.simt_add_shared_array.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    library.simt_take_diagnoses.restype = ctypes.c_char_p
    library.simt_allow_seconds.argtypes = [ctypes.c_long]
    library.simt_set_order.argtypes = [ctypes.c_int, ctypes.c_uint64]
    return library


@cache
def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    base = _load_address(path)
    for array in shared_arrays(path.with_name(builds.SYMBOLS)):
        _runtime().simt_add_shared_array(base + array.offset, array.bytes, array.name.encode())
    if hasattr(library, "simt_dump_coverage"):
        coverage.count_later(library, path)
    return library


def _load_address(path: Path) -> int:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            return int(line.partition("-")[0], 16)  # the first mapping is the beginning of the file
    raise RuntimeError(f"{path} was loaded, but /proc/self/maps does not have it")
