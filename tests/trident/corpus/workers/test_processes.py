"""Starting and ending processes, and what they say when they fail."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time

import pytest

from megatron.errors import CheckpointError, DataError, MegatronError
from trident.corpus.workers.processes import (
    WorkerError,
    exit_error,
    failure_message,
    raise_failure,
    start_process,
    stop_processes,
    usable_cores,
)


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        (DataError("line 7"), DataError, "^line 7$"),
        (WorkerError("gone"), WorkerError, "^gone$"),
        (CheckpointError("odd"), WorkerError, "^CheckpointError: odd$"),
    ],
)
def test_an_error_crosses_a_pipe_with_its_type(failure: MegatronError, kind: type[MegatronError], text: str) -> None:
    message = json.loads(json.dumps(failure_message(failure)))
    with pytest.raises(kind, match=text):
        raise_failure(message)


def test_other_messages_raise_nothing() -> None:
    raise_failure({"facts": 1})


def started(body: object) -> multiprocessing.process.BaseProcess:
    """A forked process that runs `body`."""
    kept: list[multiprocessing.process.BaseProcess] = []
    start_process("fork", body, (), kept.append)  # type: ignore[arg-type]
    return kept[0]


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="processes are not forked here")
def test_the_end_of_a_process_is_described() -> None:
    killed = started(lambda: os.kill(os.getpid(), signal.SIGKILL))
    text = r"^worker 3 was killed by signal 9 \(SIGKILL\); nothing was published\. .* use fewer --num-workers;"
    with pytest.raises(WorkerError, match=text):
        raise exit_error("worker 3", killed, "--num-workers")
    with pytest.raises(WorkerError, match="worker 4 exited with code 5"):
        raise exit_error("worker 4", started(lambda: os._exit(5)))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="processes are not forked here")
def test_a_process_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trident.corpus.workers.processes.STOP_SECONDS", 0.1)
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def ignore() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sender.send_bytes(b"ready")
        time.sleep(60)

    process = started(ignore)
    receiver.recv_bytes()
    stop_processes([process])
    assert process.exitcode == -signal.SIGKILL


def test_there_is_a_core() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
