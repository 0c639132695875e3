"""The thread that reads ahead: order, failures of any kind, and a thread that cannot be started."""

import _thread
import ctypes
import threading
from collections.abc import Iterator

import pytest

from megatron.data import read_ahead as module
from megatron.data.read_ahead import ReadAhead
from megatron.errors import DataError, StorageError

PATIENCE_SECONDS = 120


@pytest.fixture
def thread() -> Iterator[ReadAhead]:
    made = ReadAhead()
    yield made
    made.close()


class Source:
    """Yields numbers, one after each `go`, and notes which thread reads them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []
        self.readers: set[int] = set()
        self.began = threading.Event()
        self.go = threading.Semaphore(0)

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            self.readers.add(threading.get_ident())
            self.began.set()
            assert self.go.acquire(timeout=PATIENCE_SECONDS)
            self.read.append(number)
            yield number


def failing(failure: BaseException) -> Iterator[int]:
    yield 1
    raise failure


def test_results_come_in_any_order_from_one_thread(thread: ReadAhead) -> None:
    sources = [Source(count) for count in (3, 0, 2)]
    readings = [thread.submit(source) for source in sources]
    for source in sources:
        for _ in range(source.count):
            source.go.release()
    assert [reading.result() for reading in reversed(readings)] == [[0, 1], [], [0, 1, 2]]
    assert readings[0].result() == [0, 1, 2]
    readers = sources[0].readers | sources[2].readers
    assert len(readers) == 1 and threading.get_ident() not in readers


def test_a_cancelled_reading_stops_and_its_source_is_free(thread: ReadAhead) -> None:
    source = Source(1000)
    reading = thread.submit(source)
    assert source.began.wait(PATIENCE_SECONDS)
    threading.Timer(0.05, source.go.release).start()
    reading.cancel()
    assert source.read == [0]
    unread = thread.submit(Source(5))
    unread.abandon()
    assert unread.result() == []
    assert thread.submit([7]).result() == [7]


@pytest.mark.parametrize("failure", [DataError("row 3 is damaged"), ValueError("a bug"), OSError("gone")])
def test_an_error_of_the_data_is_raised_as_it_is_and_the_thread_goes_on(thread: ReadAhead, failure: Exception) -> None:
    with pytest.raises(type(failure), match=str(failure)):
        thread.submit(failing(failure)).result()
    assert thread.submit([1]).result() == [1]


@pytest.mark.parametrize("failure", [MemoryError(), SystemExit(0), KeyboardInterrupt(), GeneratorExit("odd")])
def test_what_would_end_the_program_silently_is_an_error_of_the_run(thread: ReadAhead, failure: BaseException) -> None:
    reading = thread.submit(failing(failure))
    for _ in range(2):
        with pytest.raises(StorageError, match=f"Reading data ahead failed with {type(failure).__name__}.*num-workers"):
            reading.result()


def test_a_thread_killed_between_two_readings_is_an_error_at_the_next_request(
    thread: ReadAhead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.05)
    source = Source(1)
    reading = thread.submit(source)
    assert source.began.wait(PATIENCE_SECONDS)
    # raised at the thread's next instruction of Python, wherever that is
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(source.readers.pop()), ctypes.py_object(type("Killed", (BaseException,), {}))
    )
    source.go.release()
    with pytest.raises(StorageError, match="failed with Killed|ended with Killed"):
        reading.result()


@pytest.mark.parametrize("reason", [None, "from outside"])
def test_a_thread_that_is_gone_is_an_error_at_every_later_request(
    thread: ReadAhead, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.05)
    if reason is None:
        assert thread.submit([1]).result() == [1]
        thread._requests.put(None)
    else:
        monkeypatch.setattr(module.PendingRead, "read", lambda self: _thread.exit())
    for _ in range(3):
        reading = thread.submit([2])
        with pytest.raises(StorageError, match="read-ahead thread exited (without an error|with SystemExit)"):
            reading.result()
        with pytest.raises(StorageError, match=r"Free memory .* \(--num-workers 0\)"):
            reading.cancel()


def refused(*words: object) -> None:
    raise RuntimeError("can't start new thread")


def silent(*words: object) -> int:
    return 7


@pytest.mark.parametrize(("start", "reason"), [(refused, "can't start new thread"), (silent, "did not start running")])
def test_without_a_thread_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], start: object, reason: str
) -> None:
    monkeypatch.setattr(_thread, "start_new_thread", start)
    monkeypatch.setattr(module, "_START_SECONDS", 0.05)
    thread = ReadAhead()
    assert [thread.submit([1]) for _ in range(3)] == [None] * 3
    thread.close()
    warnings = capsys.readouterr().err
    assert warnings.count("warning") == 1 and reason in warnings and "read on demand" in warnings


def test_closing_waits_for_a_read_in_progress_but_not_forever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    thread, source = ReadAhead(), Source(2)
    reading = thread.submit(source)
    assert source.began.wait(PATIENCE_SECONDS)
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.05)
    reading.abandon()
    thread.close()
    assert "did not exit within 0.05 s and is abandoned" in capsys.readouterr().err
    source.go.release()
    assert reading.result() == [0]
    assert thread.submit([1]) is None
    monkeypatch.setattr(module, "_CLOSE_SECONDS", PATIENCE_SECONDS)
    quick = ReadAhead()
    assert quick.submit([1]).result() == [1]
    quick.close()
    quick.close()
    assert capsys.readouterr().err == ""
