"""What a run tells those who watch it, in addition to its metrics: events, samples, and where its ranks are.

Three small files in the run folder, written by rank 0: `events.jsonl`, `samples.jsonl`, `heartbeats.json`. Nothing here
may end a run or hold it up.
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
    """Writes nothing until `open` is called, which only rank 0 does.

    What the file system refuses is a warning, once.
    """

    def __init__(self, beat_seconds: float = _BEAT_SECONDS) -> None:
        self._beat_seconds = beat_seconds
        self._folder: Path | None = None
        self._look: Callable[[], Sequence[Mapping[str, Any]]] = lambda: ()
        self._ask: Callable[[], object] = lambda: None
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
        look: Callable[[], Sequence[Mapping[str, Any]]],
        ask: Callable[[], object] = lambda: None,
    ) -> None:
        """Begins with the heartbeats.

        Args:
            axes: names and sizes of the axes of the mesh, slowest first.
            look: where each rank was when it last said so, as JSON objects; called from another thread.
            ask: has all ranks say so now; called before the last look at a run that ends as planned.
        """
        self._folder, self._axes, self._look, self._ask = folder, tuple(axes), look, ask
        self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            self._thread.start()

    def saved(self, path: Path) -> None:
        """Records a checkpoint that was committed. Any thread may call it."""
        self._append(EVENTS_NAME, {"kind": "save", "iteration": folder_step(path.name), "text": path.name})

    def failed_save(self, step: int, reason: str) -> None:
        """Records that the checkpoint of a step could not be saved."""
        text = masked(reason.strip())[:_LONGEST_TEXT]
        self._append(EVENTS_NAME, {"kind": "failed_save", "iteration": step, "text": text})

    def noted(self, kind: str, step: int, text: str) -> None:
        """Records something that was noticed at a step."""
        self._append(EVENTS_NAME, {"kind": kind, "iteration": step, "text": text})

    def sampled(self, step: int, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Records how the network continues some prompts."""
        samples = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        self._append(SAMPLES_NAME, {"iteration": step, "samples": samples})

    def stopping(self, reason: str) -> None:
        """Notes why the run is about to end before all its samples are consumed."""
        self._reason = reason

    @contextlib.contextmanager
    def until_end(self, step: Callable[[], int]) -> Iterator[None]:
        """Records how the block ends: as planned, as a rule or a signal said, or with an error.

        Args:
            step: the step that was reached.
        """
        forget = process_exit.on_failure(lambda code, text: self._ended(FAILED, step(), text, code))
        try:
            yield
        except BaseException as failure:
            self._ended(FAILED, step(), str(failure) or type(failure).__name__, None)
            raise
        else:
            kind = STOPPED if self._reason else FINISHED
            code = None if self._reason else int(ExitCode.DONE)
            self._ended(kind, step(), self._reason, code)
            self._ask()
        finally:
            forget()
            self.close()

    def close(self) -> None:
        """Ends the heartbeats; idempotent."""
        self._over.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(self._beat_seconds)

    def _ended(self, kind: str, step: int, text: str, code: int | None) -> bool:
        """Of several ends the first one counts. Always False: the error is still to be shown."""
        if self._folder is not None and self._ending.acquire(blocking=False):
            values = {"iteration": step, "text": masked(text.strip())[:_LONGEST_TEXT], "code": code}
            self._append(EVENTS_NAME, {"kind": kind, **values})
        return False

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        """Adds a line."""
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
        """Replaces the file as a whole; not synced, as the next one follows at once."""
        folder = self._folder
        if folder is None:
            return
        content = json.dumps({"at": time.time(), "axes": self._axes, "ranks": list(self._look())})
        try:
            replace_file(folder / HEARTBEATS_NAME, content.encode(), durable=False)
        except OSError as failure:
            self._warn(HEARTBEATS_NAME, failure)

    def _warn(self, name: str, failure: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(f"{self._folder}/{name} cannot be written: {failure.strerror}. Training continues without it.")
