"""Programs that need PyTorch, started as users start them, but from a process that has already imported it.

For tests of what a program does. A test of how a process starts, or of what a signal does to a process tree, starts
`sys.executable`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing
import multiprocessing.process
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.helpers.ranks import fork_server_context

_CLIENT = Path(__file__).with_name("python_client.py")
_PIPES: list[Connection] = []  # kept open: a server ends when its pipe is closed


@functools.cache
def forking_python() -> str:
    """The path of a stand-in for `sys.executable` that runs each program in a fork of a server.

    The program gets the arguments, folder, environment, standard streams and signals of the stand-in, which ends with
    its exit code, and programs that it starts with `sys.executable` are forked too. What differs from an interpreter:
    the modules of `tests.helpers.preloaded` are loaded, the process ID is another one, and interpreter flags but `-u`,
    `-m` and `-c` are not understood.
    """
    folder = tempfile.TemporaryDirectory(prefix="python")
    atexit.register(folder.cleanup)
    address, stand_in = str(Path(folder.name) / "socket"), Path(folder.name) / "python"
    stand_in.write_text(stand_in_text(address))
    stand_in.chmod(0o755)
    context = fork_server_context()
    ours, theirs = context.Pipe()
    context.Process(target=serve, args=(address, str(stand_in), theirs), daemon=True).start()
    theirs.close()
    ours.recv()  # the server listens
    _PIPES.append(ours)
    return str(stand_in)


def stand_in_text(address: str) -> str:
    """The text of a stand-in for `sys.executable` whose server listens at an address."""
    return f'#!/bin/sh\nexec "{sys.executable}" -IS "{_CLIENT}" "{address}" "$@"\n'


def serve(address: str, stand_in: str, tests: Connection) -> None:
    """Forks twice for each client: the process that attends to it, and from that the program.

    Ends with the process that runs the tests, however that ends.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    tests.send(True)
    while True:
        ready, _, _ = select.select([listener, tests], [], [])
        if tests in ready:
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            tests.close()
            _attend(client, stand_in)
        client.close()


def _attend(client: socket.socket, stand_in: str) -> NoReturn:
    """Starts the program of a client, hands it the client's signals, and tells the client how it ended."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writer)
    header, streams, _, _ = socket.recv_fds(client, 8, 3)
    request = json.loads(client.recv(int.from_bytes(header, "little"), socket.MSG_WAITALL))
    program = os.fork()
    if program == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (reader, writer, client.detach()):
            os.close(descriptor)
        _become(stand_in, streams, request)
    for stream in streams:
        os.close(stream)
    ended, status = os.waitpid(program, os.WNOHANG)
    while not ended:
        ready, _, _ = select.select([client, reader], [], [])
        if reader in ready:
            os.read(reader, 64)
        if client in ready:
            received = client.recv(1)  # nothing: the client was killed
            os.kill(program, received[0] if received else signal.SIGKILL)
        ended, status = os.waitpid(program, os.WNOHANG)
    with contextlib.suppress(OSError):
        client.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
    os._exit(0)


def _become(stand_in: str, streams: list[int], request: dict[str, Any]) -> NoReturn:
    """Turns this process into `python WORDS`, and ends it."""
    from tests.helpers import preloaded  # loaded here already, and not in the process that runs the tests

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.executable = stand_in
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = open(0)
    # A process of its own, not one that multiprocessing started: it may start others.
    multiprocessing.process._current_process = preloaded.MAIN_PROCESS  # type: ignore[attr-defined]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    try:
        _run(request["words"])
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 255)


def _run(words: list[str]) -> None:
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        words = words[1:]
    if words[0] in ("-c", "-"):
        source = words[1] if words[0] == "-c" else sys.stdin.read()
        sys.argv = [words[0], *words[1 + (words[0] == "-c") :]]
        exec(source, {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
