"""The activity of a run for its observers, in addition to metrics: events, generated samples, positions of the ranks.

Rank 0 writes three small files into the run folder: `events.jsonl`, `samples.jsonl`, `heartbeats.json`. Nothing here
may end or delay a run.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from megatron import log, process_exit
from megatron.checkpoint.manifest import folder_step
from megatron.errors import ExitCode
from megatron.files.appending import append_line
from megatron.files.replacing import replace_file
from megatron.secret_text import masked

EVENTS_NAME, SAMPLES_NAME, HEARTBEATS_NAME = "events.jsonl", "samples.jsonl", "heartbeats.json"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
_BEAT_SECONDS = 5.0
_LONGEST_TEXT = 2_000


@final
class Activity:
    """Writes the files once `open` was called, on rank 0 only. File system errors are a single warning."""

    def __init__(self, beat_seconds: float = _BEAT_SECONDS) -> None:
        self._beat_seconds = beat_seconds
        self._folder: Path | None = None
        self._ranks: Callable[[], Sequence[Mapping[str, Any]]] = lambda: ()
        self._poll: Callable[[], object] = lambda: None
        self._axes: tuple[tuple[str, int], ...] = ()
        self._ending = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._reason = ""
        self._has_warned = False

    def open(
        self,
        folder: Path,
        axes: Sequence[tuple[str, int]],
        ranks: Callable[[], Sequence[Mapping[str, Any]]],
        poll: Callable[[], object] = lambda: None,
    ) -> None:
        """Starts the heartbeats.

        Args:
            axes: names and sizes of the mesh axes, slowest first.
            ranks: returns the last reported position of each rank as JSON objects; called from another thread.
            poll: requests the current position of all ranks; called before the last heartbeat of a finished run.
        """
        self._folder, self._axes, self._ranks, self._poll = folder, tuple(axes), ranks, poll
        self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        with contextlib.suppress(RuntimeError):  # cannot start a thread
            self._thread.start()

    def saved(self, path: Path) -> None:
        """Records a committed checkpoint; may be called from any thread."""
        self._append(EVENTS_NAME, {"kind": "save", "iteration": folder_step(path.name), "text": path.name})

    def failed_save(self, step: int, reason: str) -> None:
        text = masked(reason.strip())[:_LONGEST_TEXT]
        self._append(EVENTS_NAME, {"kind": "failed_save", "iteration": step, "text": text})

    def noted(self, kind: str, step: int, text: str) -> None:
        """Records an event of another kind at a step."""
        self._append(EVENTS_NAME, {"kind": kind, "iteration": step, "text": text})

    def sampled(self, step: int, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Records generated continuations of prompts."""
        samples = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        self._append(SAMPLES_NAME, {"iteration": step, "samples": samples})

    def stopping(self, reason: str) -> None:
        """Sets the reason why the run ends before all its samples are consumed."""
        self._reason = reason

    @contextlib.contextmanager
    def until_end(self, step: Callable[[], int]) -> Iterator[None]:
        """Records the end of the block: finished, stopped by a rule or signal, or failed.

        Args:
            step: returns the current step.
        """
        unregister = process_exit.on_failure(lambda code, text: self._ended(FAILED, step(), text, code))
        try:
            yield
        except BaseException as failure:
            self._ended(FAILED, step(), str(failure) or type(failure).__name__, None)
            raise
        else:
            kind = STOPPED if self._reason else FINISHED
            code = None if self._reason else int(ExitCode.DONE)
            self._ended(kind, step(), self._reason, code)
            self._poll()
        finally:
            unregister()
            self.close()

    def close(self) -> None:
        """Stops the heartbeats; idempotent."""
        self._over.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(self._beat_seconds)

    def _ended(self, kind: str, step: int, text: str, code: int | None) -> bool:
        """Records the first of several ends. Returns False, so that the error is still printed."""
        if self._folder is not None and self._ending.acquire(blocking=False):
            values = {"iteration": step, "text": masked(text.strip())[:_LONGEST_TEXT], "code": code}
            self._append(EVENTS_NAME, {"kind": kind, **values})
        return False

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        if self._folder is None:
            return
        try:
            line = json.dumps({"at": time.time(), **values}, ensure_ascii=False)
            append_line(self._folder / name, line)
        except OSError as failure:
            self._warn(name, failure)

    def _beat(self) -> None:
        is_over = False
        while not is_over:
            self._write_heartbeats()
            is_over = self._over.wait(self._beat_seconds)
        self._write_heartbeats()

    def _write_heartbeats(self) -> None:
        folder = self._folder
        if folder is None:
            return
        content = json.dumps({"at": time.time(), "axes": self._axes, "ranks": list(self._ranks())})
        try:
            replace_file(folder / HEARTBEATS_NAME, content.encode(), durable=False)  # the next one follows soon
        except OSError as failure:
            self._warn(HEARTBEATS_NAME, failure)

    def _warn(self, name: str, failure: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(f"{self._folder}/{name} cannot be written: {failure.strerror}. Training continues without it.")
