"""What the device says of itself, on CPU; and which GPU a process takes."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from megatron import device
from megatron.errors import LaunchError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretends that two GPUs are there; returns the list of those chosen."""
    chosen: list[int] = []
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert device.device_type() == "cpu"
    assert device.local_device(5) == device.current_device() == torch.device("cpu")
    assert device.default_backend() == "gloo"
    assert device.device_count() == 1
    assert device.device_name() == "cpu"
    assert device.supports_bf16() and not device.supports_fp16() and not device.supports_fp8()
    assert device.peak_memory_allocated_bytes() == 0
    assert device.default_generator(torch.device("cpu")) is torch.default_generator
    device.synchronize()


def test_more_processes_than_gpus(two_gpus: list[int]) -> None:
    with pytest.raises(LaunchError, match="No GPU for local rank 2: 2 visible.*CUDA_VISIBLE_DEVICES=not set"):
        device.local_device(2)


def test_a_launcher_that_shows_one_gpu_to_each_process(two_gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device.local_device(3, one_device_per_process=True) == torch.device("cuda", 0)
    with pytest.raises(LaunchError, match="No GPU for local rank 3"):
        device.local_device(3)


def test_the_local_rank_is_the_number_of_a_gpu_while_others_take_it_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    for name in names:
        monkeypatch.setenv(name, "3")
    with pytest.raises(ValueError, match="leaves"), device.as_local_rank(torch.device("cuda", 0)):
        assert [os.environ[name] for name in names] == ["0", "0"]
        raise ValueError("leaves")
    monkeypatch.delenv(names[1])
    with device.as_local_rank(torch.device("cpu")):
        assert [os.environ.get(name) for name in names] == ["3", None]
    assert [os.environ.get(name) for name in names] == ["3", None]


def test_copies_on_the_cpu_are_complete_when_they_return() -> None:
    buffer = device.host_buffer(40, torch.device("cpu"))
    sources = [torch.arange(4.0), torch.arange(12.0)[::2]]
    targets = [buffer[:16].view(torch.float32), buffer[16:40].view(torch.float32)]
    copies = device.HostCopies(torch.device("cpu"))
    copies.mark()
    copies.copy(zip(targets, sources, strict=True))
    copies.hold_device()
    copies.wait()
    assert all(torch.equal(*pair) for pair in zip(targets, sources, strict=True))


class Runtime:
    """As much of the CUDA runtime as locking memory needs: what is locked, and what it answers."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        if self.status == 0:
            self.locked[address] = size_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_a_buffer_for_copies_from_a_gpu_locks_what_it_holds_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own pinned memory takes the next power of two."""
    runtime, gpu = Runtime(), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffer = device.host_buffer(33 * 2**16, gpu)
    assert runtime.locked == {buffer.data_ptr(): 33 * 2**16} and buffer.untyped_storage().nbytes() == 33 * 2**16
    part = buffer[8:16].view(torch.float32)
    del buffer
    assert len(runtime.locked) == 1  # a part of it is still in use
    del part
    assert runtime.locked == {}
    device.host_buffer(0, gpu)
    assert runtime.locked == {}


def test_memory_for_copies_that_the_system_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    with pytest.raises(MemoryError, match=r"cannot lock 40 bytes of host memory \(cudaHostRegister: 2\)"):
        device.host_buffer(40, torch.device("cuda"))
    with pytest.raises(MemoryError, match="cannot allocate 9223372036854775807 bytes of host memory"):
        device.host_buffer(2**63 - 1, torch.device("cpu"))


@pytest.mark.gpu
def test_copies_from_a_gpu_hold_values_from_before_the_next_kernels() -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    values, copies = torch.ones(2**24, device=gpu), device.HostCopies(gpu)
    target = device.host_buffer(2**26, gpu).view(torch.float32)
    copies.mark()
    thread = threading.Thread(target=copies.copy, args=([(target, values)],))
    thread.start()
    thread.join()
    copies.hold_device()
    values.zero_()
    copies.wait()
    assert target.is_pinned() and bool((target == 1).all())


def test_a_stopwatch_adds_up_what_was_timed_since_it_was_started() -> None:
    watch = device.Stopwatch()
    watch.start()
    with watch.running():
        time.sleep(0.002)
    with pytest.raises(ValueError), watch.running("transfer"):
        raise ValueError
    found = watch.take()
    assert [kind for kind, *_ in found.parts] == ["", "transfer"]
    assert found.seconds("") >= 0.002 and found.seconds("transfer") > 0.0
    assert found.seconds() == found.seconds("") + found.seconds("transfer")
    with watch.running():
        pass
    assert watch.take().parts == []


def test_a_stopwatch_counts_nothing_while_it_is_paused() -> None:
    watch = device.Stopwatch()
    watch.start()
    with watch.paused(), watch.running():
        pass
    with watch.running("after"):
        pass
    assert [kind for kind, *_ in watch.take().parts] == ["after"]


@pytest.mark.gpu
def test_captured_work_is_done_when_it_is_replayed() -> None:
    capturer = device.GraphCapturer(torch.device("cuda"))
    values = torch.ones(3, device="cuda")
    assert capturer.warm_up(lambda: values * 2).tolist() == [2.0] * 3
    work, doubled = capturer.capture(lambda: values * 2, capturer.new_memory())
    for number in (3.0, 4.0):
        values.fill_(number)
        work.replay()
        assert doubled.tolist() == [2 * number] * 3
    work.release()


@pytest.mark.gpu
@pytest.mark.parametrize("read", [False, True], ids=["in Python", "by a read of the host"])
def test_a_capture_that_fails_leaves_the_device_as_it_was(read: bool) -> None:
    capturer = device.GraphCapturer(torch.device("cuda"))
    values = torch.ones(3, device="cuda")

    def broken() -> float:
        drawn = torch.rand(3, device="cuda")
        if read:
            return float(values.sum() + drawn.sum())
        raise RuntimeError("planted while the stream is capturing")

    for _ in range(2):
        with pytest.raises(device.CaptureError, match="captur"):
            capturer.capture(broken, capturer.new_memory())
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.cuda.empty_cache()
        assert 0 <= float(torch.rand((), device="cuda")) <= 1
        work, doubled = capturer.capture(lambda: values * 2, capturer.new_memory())
        work.replay()
        assert doubled.tolist() == [2.0] * 3
        work.release()


@pytest.mark.gpu
def test_a_stopwatch_times_the_stream_of_a_gpu() -> None:
    watch = device.Stopwatch()
    watch.start()
    matrix = torch.ones(4096, 4096, device="cuda")
    with watch.running():
        for _ in range(20):
            matrix = matrix @ matrix
    assert watch.take().seconds() > 0.0
