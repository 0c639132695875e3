"""Runs a function on several CPU processes that find each other the way torchrun's ranks do."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

# What a rank's process is given, and what a run inside a test's own process leaves in its environment.
LAUNCH_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"),
)


class RankFailure(AssertionError):
    """A rank raised, died or did not finish; the text is the first failing rank's traceback."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *arguments: Any, backend: str = "gloo", timeout_seconds: float = 120
) -> list[Any]:
    """Calls `fn(rank, *arguments)` on `world_size` processes and returns their results in rank order.

    `fn` must live at the top of an importable module, and it, its arguments and its results must be picklable. A rank
    sees the caller's environment plus torchrun's variables and one CPU thread; with `backend="gloo"` no GPU is visible
    to it. No rank ends before all have returned, so none needs to close its process group.

    Raises:
        RankFailure: a rank failed; shows the traceback of the one that failed first.
    """
    context = fork_server_context(backend)
    with tempfile.TemporaryDirectory() as stack_folder:
        started = []
        shared = _environment(world_size, backend)
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            stack_file = str(Path(stack_folder) / f"stack{rank}.txt")
            process = context.Process(
                target=_rank_main, args=(theirs, rank, shared, stack_file, timeout_seconds, fn, arguments), daemon=True
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        patience_seconds = 0.0
        try:
            results = _collect([pipe for _, pipe in started], stack_folder, timeout_seconds)
            patience_seconds = 5.0
            return results
        finally:
            for _, pipe in started:
                pipe.close()
            for process, _ in started:
                process.join(patience_seconds)
                if process.is_alive():
                    process.kill()
                    process.join()


def fork_server_context(backend: str = "gloo") -> ForkServerContext:
    """How to start processes that have everything imported."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if backend == "gloo" else "cuda")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no threads in the server: it is forked
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preloaded"])
    return context


def free_port() -> int:
    """A TCP port of this machine that is free now, and in all likelihood still is when a process listens on it.

    The system takes ports from one range for connections and for who asks for any port. This one is drawn at random
    from outside of that range, so that other tests and programs do not take it in the meantime.
    """
    outside = _ports_given_to_nobody()
    for port in random.SystemRandom().sample(outside, min(100, len(outside))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _ports_given_to_nobody() -> range:
    """The larger of the two ranges of ports below and above the one that the system gives ports from."""
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        first, last = 49152, 65535  # IANA's range, which macOS uses
    return max(range(10_000, first), range(last + 1, 65_000), key=len)


def _environment(world_size: int, backend: str) -> dict[str, str]:
    environment = dict(os.environ)
    environment.update(
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),  # without it DeepSpeed starts numactl in every step of ZeRO-3
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        OMP_NUM_THREADS="1",
    )
    if backend == "gloo":
        environment.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo")
    return environment


def _collect(pipes: list[Connection], stack_folder: str, timeout_seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    deadline = time.monotonic() + timeout_seconds + 5  # the ranks write their stacks at timeout_seconds
    while len(results) + len(failures) < len(pipes) and not failures:
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            stacks = "\n".join(_stack(stack_folder, rank) for rank in range(len(pipes)) if rank not in results)
            raise RankFailure(f"not finished after {timeout_seconds} s:\n{stacks}")
        _receive_all(pipes, results, failures, stack_folder)
        if failures:
            time.sleep(0.05)  # two failures in quick succession: both arrive, and the earlier one is shown
            _receive_all(pipes, results, failures, stack_folder)
    if failures:
        _, rank, text = min(failures)
        raise RankFailure(f"rank {rank} failed first:\n{text}")
    return [results[rank] for rank in range(len(pipes))]


def _receive_all(
    pipes: list[Connection],
    results: dict[int, Any],
    failures: list[tuple[float, int, str]],
    stack_folder: str,
) -> None:
    heard = {*results, *(rank for _, rank, _ in failures)}
    for rank, pipe in enumerate(pipes):
        if rank not in heard and pipe.poll():
            _receive(rank, pipe, results, failures, stack_folder)


def _receive(
    rank: int, pipe: Connection, results: dict[int, Any], failures: list[tuple[float, int, str]], stack_folder: str
) -> None:
    try:
        ok, at, payload = pickle.loads(pipe.recv_bytes())
    except EOFError:
        # A rank that left by itself speaks after those that raised because of it, so it counts as the earliest.
        failures.append(
            (0.0, rank, f"rank {rank} ended without a word (killed, or os._exit)\n{_stack(stack_folder, rank)}")
        )
        return
    if ok:
        results[rank] = payload
    else:
        failures.append((at, rank, payload))


def _stack(stack_folder: str, rank: int) -> str:
    path = Path(stack_folder) / f"stack{rank}.txt"
    return f"--- rank {rank} ---\n{path.read_text() if path.exists() else ''}"


def _rank_main(
    pipe: Connection,
    rank: int,
    environment: dict[str, str],
    stack_file: str,
    timeout_seconds: float,
    fn: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch

    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with Path(stack_file).open("w") as stacks:
        faulthandler.dump_traceback_later(timeout_seconds, file=stacks)
        try:
            message = (True, time.time(), fn(rank, *arguments))
            payload = pickle.dumps(message)
        except BaseException:
            payload = pickle.dumps((False, time.time(), traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
        try:
            pipe.send_bytes(payload)
            pipe.poll(timeout_seconds)  # until the parent has heard all ranks and closes its end
        except OSError:
            pass
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
