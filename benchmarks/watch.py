"""The cost of the hang watch between ranks, and of watching a run.

    python benchmarks/watch.py

Prints one JSON line per measurement: what the main thread of a rank pays to say that it enters a phase, to time a
message to another rank, and to record a step, in metrics.jsonl and with a progress bar; and how much of a core the
thread of rank 0 takes with this many other ranks, all simulated by another process, which report as often as real
ones do: every second at most. The last lines need a quiet machine.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure
from megatron.checkpoint.record import Progress
from megatron.config import ConfigSection, OptimConfig, ReportConfig, flag, parse_flags
from megatron.device import Stopwatch, peak_memory_bytes
from megatron.objective.metric import Reduction, StepMetrics, metrics_of
from megatron.observe.metrics_file import MetricsFile
from megatron.observe.progress_bar import ProgressBar
from megatron.observe.report import Report, ReportOutputs
from megatron.observe.speed import Workload
from megatron.observe.styles import megatron as megatron_style
from megatron.parallel.mesh import Axis
from megatron.parallel.processes import ProcessIdentity
from megatron.parallel.watch.channel import Channel
from megatron.parallel.watch.coordinator import Coordinator
from megatron.parallel.watch.limits import WatchLimits
from megatron.parallel.watch.position import Heartbeat, Position, first_position
from megatron.parallel.watch.verdict import RunEnd
from megatron.parallel.watch.wire import Connection
from megatron.train.watchdog import Watch

_TOKEN = "0" * 32

# The result of a step.
WAITS = {"data_wait_seconds": 0.01, "communication_seconds": 0.02, "transfer_seconds": 0.01}
STEP = SimpleNamespace(
    loss=2.5,
    token_count=8192,
    gradient_norm=0.5,
    sample_count=8,
    skipped=False,
    is_spike=False,
    consecutive_bad=0,
    loss_scale=1.0,
    metrics=StepMetrics(),
    sums={},
)


@dataclass(frozen=True)
class WatchFlags(ConfigSection):
    """Flags of this program."""

    ranks: int = flag(256, "simulated ranks", at_least=1)
    seconds: float = flag(10.0, "how long the thread is measured for each --hang-timeout-seconds", above=0)


class Rank:
    """A rank that is always somewhere else, and remembers how much of a core its watching thread took."""

    def __init__(self) -> None:
        self.thread: int | None = None

    def position(self) -> Position:
        self.thread = threading.get_native_id()
        return first_position()

    def is_starting(self) -> bool:
        return False

    def show(self, verdict: RunEnd) -> None:
        raise RuntimeError(f"the run would have ended: {verdict.text}")

    def end(self, verdict: RunEnd) -> None:
        raise RuntimeError(f"the run would have ended: {verdict.text}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints the figures."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = parse_flags(WatchFlags, words, prog="watch.py", description=__doc__ or "")
    print_figure("watch", "enter a phase", round(enter_nanoseconds()), "ns")
    print_figure("watch", "time a message", round(message_nanoseconds()), "ns")
    for has_bar in (False, True):
        name = "record a step, with a progress bar" if has_bar else "record a step"
        print_figure("watch", name, round(record_microseconds(has_bar), 1), "us")
    for hang_seconds in (10.0, 300.0):
        percent = hub_percent(flags.ranks, WatchLimits(hang_seconds, 600.0), flags.seconds)
        name = f"thread of rank 0, {flags.ranks} other ranks, --hang-timeout-seconds {hang_seconds:g}"
        print_figure("watch", name, round(percent, 2), "% of a core")
    return 0


def enter_nanoseconds(count: int = 200_000) -> float:
    """The least time of five to enter a phase."""
    watch = Watch()
    times = []
    for _ in range(5):
        began_at = time.perf_counter()
        for _ in range(count):
            watch.enter("forward")
        times.append((time.perf_counter() - began_at) / count * 1e9)
    return min(times)


def message_nanoseconds(count: int = 100_000) -> float:
    """The least processor time of five that a stopwatch takes around a message."""
    times = []
    for _ in range(5):
        axis = Axis("tp", 0, 2, (0, 1), None, Stopwatch())
        began_at = time.process_time()
        for _ in range(count):
            with axis.timed():
                pass
        times.append((time.process_time() - began_at) / count * 1e9)
    return min(times)


def record_microseconds(has_bar: bool, count: int = 2000) -> float:
    """The least processor time of five to report a step, for steps that follow each other without a pause."""
    times = []
    optim = OptimConfig(micro_batch_size=1, global_batch_size=8, lr=1.0, train_iters=count)
    for _ in range(5):
        with tempfile.TemporaryDirectory() as folder, contextlib.closing(MetricsFile(Path(folder) / "metrics")) as file:
            report = Report(
                ReportConfig(log_interval=count + 1),
                optim,
                Workload(1024, 1e12, peak_flops_per_second=1e12, stages=2),
                ReportOutputs(megatron_style, [file], bar=ProgressBar(lambda text: None) if has_bar else None),
            )
            report.started(Progress())
            began_at = time.process_time()
            for step in range(1, count + 1):
                progress = Progress(step, 8 * step, 8192 * step)
                report.step(
                    progress, STEP, 1.0, 0.1, metrics_of({**WAITS, "memory_bytes": peak_memory_bytes()}, Reduction.RATE)
                )
            times.append((time.process_time() - began_at) / count * 1e6)
    return min(times)


def hub_percent(ranks: int, limits: WatchLimits, seconds: float) -> float:
    """The share of a core that rank 0's thread takes while the main thread is idle."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=ranks)
    listener.setblocking(False)
    ours, theirs = multiprocessing.Pipe()
    port = listener.getsockname()[1]
    process = multiprocessing.Process(target=simulate, args=(theirs, port, ranks, limits.beat_seconds), daemon=True)
    process.start()
    rank = Rank()
    coordinator = Coordinator(0, None, [ProcessIdentity.own()] * (ranks + 1), _TOKEN, limits, time.monotonic())
    channel = Channel(rank, limits, [], coordinator, listener, 0, ranks + 1)
    channel.start()
    ours.recv()  # all are connected
    before = thread_seconds(rank)
    time.sleep(seconds)
    used = thread_seconds(rank) - before
    channel.leave()
    process.kill()
    process.join()
    return used / seconds * 100


def simulate(pipe: Pipe, port: int, ranks: int, beat_seconds: float) -> None:
    """Connects as this many ranks, each of which reports after each interval, evenly spread over it."""
    connections = []
    for number in range(1, ranks + 1):
        connection = Connection(socket.create_connection(("127.0.0.1", port)))
        connection.send({"kind": "hello", "token": _TOKEN, "rank": number})
        connections.append(connection)
    pipe.send(True)
    message = {"kind": "beat", **Heartbeat("forward", 1000, 123456, 0.01, False).values()}
    began_at = time.monotonic()
    count = 0
    while True:
        count += 1
        time.sleep(max(0.0, began_at + count * beat_seconds / ranks - time.monotonic()))
        connection = connections[count % ranks]
        connection.send(message)
        connection.receive()


def thread_seconds(rank: Rank) -> float:
    """Processor time that the thread has taken so far."""
    while rank.thread is None:
        time.sleep(0.01)
    fields = Path(f"/proc/self/task/{rank.thread}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


if __name__ == "__main__":
    sys.exit(main())
