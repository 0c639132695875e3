"""`metrics.jsonl`: one JSON object per line; a kill loses at most the line being written.

Every record has a `kind`: `start` (one per program start), `step`, `evaluation`, `task` (of --eval-tasks), `passed`
(a skipped batch), or `failed_save`. Floats round-trip exactly; NaN and infinities, which JSON lacks, are the strings
"NaN", "Infinity", "-Infinity". A resumed run appends, so that the steps after its checkpoint appear twice; the later
record counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron import log
from megatron.checkpoint.record import Progress
from megatron.errors import ConfigError, DataError, StorageError
from megatron.files.exact import write_all
from megatron.files.plain import open_plain
from megatron.files.replacing import sync_file
from megatron.objective.language_model import SOURCE_LOSSES
from megatron.objective.metric import StepMetrics
from megatron.observe.console import perplexity
from megatron.observe.metrics import TaskOutcome
from megatron.observe.names import RECORDED
from megatron.secret_text import masked

FILE_NAME = "metrics.jsonl"
_SHOWN_RUNS = 5

_START_ARGUMENTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "world_size",
    "effective_zero_stage",
)

_NOT_IN_JSON = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsFile:
    """Appends records to a file, which only one process at a time may write.

    Args:
        path: the file, in an existing folder. Removes an incomplete last line of a killed run.

    Raises:
        ConfigError: another process is writing this file.
        StorageError: the file cannot be opened or written.
    """

    is_buffered = False

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.name = str(path)
        self._is_torn = False
        self._is_open = False
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as failure:
            raise StorageError(
                f"{self.path} cannot be opened for writing: {failure.strerror}. Choose another folder (--run-dir)."
            ) from failure
        try:
            self._claim()
            self._remove_torn_line()
        except BaseException as failure:
            os.close(self._descriptor)
            if isinstance(failure, OSError):
                raise self._refused(f"its incomplete last line could not be removed: {failure.strerror}") from failure
            raise
        self._is_open = True

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Appends one record with a single write, so that a kill cannot leave it incomplete.

        A record that a full disk truncated is removed, at the latest before the next one.

        Raises:
            StorageError: the write failed.
        """
        record = {"kind": kind, **{name: _to_json(value) for name, value in values.items()}}
        data = (json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n").encode()
        try:
            if self._is_torn:
                self._remove_torn_line()
            self._is_torn = True
            write_all(lambda rest, _: os.write(self._descriptor, rest), data)
            self._is_torn = False
        except OSError as failure:
            with contextlib.suppress(OSError):
                self._remove_torn_line()
                self._is_torn = False
            raise self._refused(f"{len(data)} bytes could not be appended: {failure.strerror}") from failure

    def start(self, progress: Progress, arguments: Mapping[str, Any]) -> None:
        """Records a program start, with its parallel layout."""
        layout = {name: arguments[name] for name in _START_ARGUMENTS if name in arguments}
        self.write("start", {**progress.to_json(), "at": time.time(), **layout})

    def step(self, metrics: StepMetrics) -> None:
        self.write("step", _record_of(metrics))

    def interval(self, metrics: StepMetrics) -> None:
        """A no-op: every step is already recorded."""

    def evaluation(self, progress: Progress, group: str, loss: float | None) -> None:
        """Records a validation or test loss; null if no token counts."""
        self.write(
            "evaluation",
            {
                "iteration": progress.step,
                "consumed_samples": progress.consumed_samples,
                "consumed_tokens": progress.consumed_tokens,
                "group": group,
                "lm_loss": loss,
                "perplexity": None if loss is None else perplexity(loss),
            },
        )

    def task(self, progress: Progress, task: TaskOutcome) -> None:
        self.write(
            "task",
            {
                "iteration": progress.step,
                "consumed_samples": progress.consumed_samples,
                "consumed_tokens": progress.consumed_tokens,
                "task": task.name,
                "count": task.count,
                "figures": dict(task.figures),
                "errors": dict(task.errors),
            },
        )

    def skipped_batch(self, progress: Progress, batch: Mapping[str, int], number: int) -> None:
        self.write("passed", {"iteration": batch["step"], **batch, "passed_batches": number})

    def failed_save(self, progress: Progress, step: int, reason: str, number: int) -> None:
        self.write("failed_save", {"iteration": step, "text": masked(reason), "failed_saves": number})

    def close(self) -> None:
        """Syncs and closes the file; idempotent."""
        if self._is_open:
            self._is_open = False
            try:
                sync_file(self._descriptor)
            except OSError as failure:
                log.warning(f"{self.path} may not have reached the disk: {failure.strerror}.")
            os.close(self._descriptor)

    def _refused(self, what: str) -> StorageError:
        return StorageError(f"{self.path}: {what}. Free space there or choose another folder (--run-dir).")

    def _claim(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as failure:
            raise ConfigError(
                f"{self.path} is being written by another run. Use a separate folder for each run (--run-dir), or wait "
                "for that run to end."
            ) from failure
        except OSError:
            log.debug(f"{self.path.parent} does not support file locks; two runs in one folder are not detected.")

    def _remove_torn_line(self) -> None:
        size = os.fstat(self._descriptor).st_size
        tail, start = b"", size
        while start > 0 and b"\n" not in tail:
            step = min(start, 1 << 16)
            start -= step
            tail = os.pread(self._descriptor, step, start) + tail
        torn = tail.rpartition(b"\n")[2]
        if not torn:
            return
        if not self._is_open and _parse(torn) is not None:
            os.write(self._descriptor, b"\n")
            return
        os.ftruncate(self._descriptor, size - len(torn))
        if not self._is_open:
            log.warning(f"{self.path}: removed an incomplete last line of an earlier run ({len(torn)} bytes).")


def check_run(path: str | Path) -> None:
    """Checks that a run directory or metrics file exists.

    Raises:
        DataError: it does not; the message lists the newest runs under `runs/`, the trainer's default.
    """
    if Path(path).exists():
        return
    newest = newest_runs(Path("runs"))
    shown = f" The newest under runs/: {', '.join(map(str, newest))}." if newest else ""
    raise DataError(f"{path} does not exist. Use a run directory or its {FILE_NAME}.{shown}")


def newest_runs(folder: Path, count: int = _SHOWN_RUNS) -> list[Path]:
    """Run directories in a folder that contain metrics, most recently written first."""
    written_at = {}
    for path in folder.glob(f"*/{FILE_NAME}"):
        try:
            if not path.parent.is_symlink():
                written_at[path.parent] = path.stat().st_mtime_ns
        except OSError:  # removed meanwhile
            continue
    return sorted(written_at, key=lambda run: (-written_at[run], run.name))[:count]


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """All records of a file in the order they were written, without an incomplete last line.

    Raises:
        DataError: the file cannot be read, or a line before the last is not a record.
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    try:
        with open_plain(path) as stream:
            lines = stream.read().split(b"\n")
    except OSError as failure:
        raise DataError(
            f"{path} cannot be read: {failure.strerror}. Use a run directory or its {FILE_NAME}."
        ) from failure
    records = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        record = _parse(text)
        if record is not None:
            records.append({name: _from_json(value) for name, value in record.items()})
        elif number < len(lines):
            raise DataError(
                f"{path}:{number}: not a JSON object with a kind: {text[:80]!r}. Remove the line to continue."
            )
    return records


def read_steps(path: str | Path) -> dict[int, dict[str, Any]]:
    """The records of kind `step` by iteration; of steps repeated after a resume, the later record.

    Raises:
        DataError: see `read_records`.
    """
    steps = {int(record["iteration"]): record for record in read_records(path) if record["kind"] == "step"}
    return dict(sorted(steps.items()))


def _record_of(metrics: StepMetrics) -> dict[str, Any]:
    """The record of a step: a group of metrics is an object; losses of sources include their tokens."""
    record: dict[str, Any] = dict.fromkeys(RECORDED)
    for name, metric in metrics.items():
        group, _, member = name.partition("/")
        if not member:
            record[name] = metric.value
            continue
        members = record[group] = record.get(group) or {}
        if metric.weight:
            is_source = group == SOURCE_LOSSES
            members[member] = {"lm_loss": metric.value, "tokens": round(metric.weight)} if is_source else metric.value
    return record


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and "kind" in value else None


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_json(entry) for name, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _from_json(entry) for name, entry in value.items()}
    return _NOT_IN_JSON.get(value, value) if isinstance(value, str) else value
