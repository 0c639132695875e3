"""Figures of a page: appended to a file as JSON lines when they are known, and shown as Markdown tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS, PAGE = "results.jsonl", "results.md"


@dataclass(frozen=True)
class Target:
    """A bound that a figure has to keep; either side may be open."""

    at_least: float = -math.inf
    at_most: float = math.inf

    def __str__(self) -> str:
        parts = [f"≥ {self.at_least:g}"] if self.at_least > -math.inf else []
        return ", ".join([*parts, f"≤ {self.at_most:g}"] if self.at_most < math.inf else parts)

    def is_met(self, value: float) -> bool:
        """True if a value is within the bounds."""
        return self.at_least <= value <= self.at_most


class Recorder:
    """Writes the figures of one part.

    Args:
        folder: where `results.jsonl` is, to which every figure is appended at once.
    """

    def __init__(self, folder: Path, part: str) -> None:
        self._path = folder / RESULTS
        self._part = part

    def figure(self, name: str, value: float, unit: str, *, target: Target | None = None, **details: object) -> None:
        """Records a figure; `details` say of what, such as the model or the shape."""
        verdict = {} if target is None else {"target": str(target), "met": target.is_met(value)}
        self._write({"figure": name, "value": float(f"{value:.5g}"), "unit": unit, **verdict, "details": details})

    def note(self, name: str, text: str, **details: object) -> None:
        """Records a fact without a number: what was not run and why, or what failed."""
        self._write({"figure": name, "text": text, "details": details})

    def _write(self, record: Mapping[str, object]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"part": self._part, **record}) + "\n")


def read_records(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The records of some files, in order; a last line that a killed process left unfinished is dropped."""
    records = []
    for path in paths:
        for line in path.read_text("utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
    return records


def page(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The lines of a Markdown page: the machine, then a table for each part."""
    parts = dict.fromkeys(record["part"] for record in records)
    for part in parts:
        own = [record for record in records if record["part"] == part]
        if part == "machine":
            yield "; ".join(f"{record['figure']} {record['text']}" for record in own) + "."
            yield ""
            continue
        yield f"### {part}"
        yield ""
        yield "| of | figure | measured | target | |"
        yield "|---|---|---|---|---|"
        yield from map(_row, own)
        yield ""
    judged = [record for record in records if "met" in record]
    yield f"{sum(record['met'] for record in judged)} of {len(judged)} targets met."


def write_page(folder: Path) -> None:
    """Renders the page of a folder from its records."""
    lines = page(read_records([folder / RESULTS]))
    (folder / PAGE).write_text("\n".join(lines) + "\n", "utf-8")


def _row(record: Mapping[str, Any]) -> str:
    details = ", ".join(f"{name} {value}" if name != "of" else str(value) for name, value in record["details"].items())
    measured = str(record["text"]) if "text" in record else f"{record['value']:,g} {record['unit']}".strip()
    verdict = ("met" if record["met"] else "missed") if "met" in record else ""
    cells = (details, record["figure"], measured, record.get("target", ""), verdict)
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
