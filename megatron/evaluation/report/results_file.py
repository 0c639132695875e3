"""The file of results: everything about an evaluation as JSON, complete after each task, never half of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import megatron
from megatron.data.formats.atomic_files import write_atomically
from megatron.errors import DataError
from megatron.evaluation.tasks.task import TaskResult

FORMAT = "megatron-evaluation"
FORMAT_VERSION = 1
MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Outcome:
    """A task that was run: its result, or why there is none."""

    title: str
    result: TaskResult | None = None
    failure: str | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """What the file holds about it."""
        if self.result is None:
            return {"name": self.title, "failure": self.failure}
        return {**asdict(self.result), "seconds": round(self.seconds, 3)}


def write_results(path: Path, about: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Writes the file, over an older one.

    Args:
        about: what was evaluated and how: checkpoint, tokenizer, layout, seed, limit.

    Raises:
        StorageError: the file system refused; an older file is as it was.
    """
    tree = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "version": megatron.__version__,
        **about,
        "tasks": [outcome.to_json() for outcome in outcomes],
    }
    text = json.dumps(_without_infinities(tree), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def write(stream: BinaryIO) -> None:
        stream.write(text.encode(errors="backslashreplace"))

    write_atomically(path, write)


def read_results(path: Path) -> dict[str, Any]:
    """A file that `write_results` wrote.

    Raises:
        DataError: it cannot be read or is something else.
    """
    try:
        with path.open("rb") as stream:
            tree = json.loads(stream.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError) as failure:
        raise DataError(f"{path} cannot be read as results of an evaluation: {failure}.") from failure
    if not isinstance(tree, dict) or tree.get("format") != FORMAT or tree.get("format_version") != FORMAT_VERSION:
        raise DataError(f"{path} holds no results of tools/evaluate.py of this version.")
    return tree


def _without_infinities(value: Any) -> Any:
    """JSON has no word for infinities and not-a-number: they become texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinities(item) for item in value]
    return value
