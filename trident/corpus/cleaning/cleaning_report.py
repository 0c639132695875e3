"""The report of a cleaning run: counts and examples for every reason, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_EXAMPLE_CHARACTERS = 80


@dataclass
class Reason:
    """The number of documents dropped or changed for one reason, and the first few of them.

    Args:
        examples: `where` is input and line, `shown` the beginning of the text, or the text around a change.
    """

    documents: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)


@dataclass
class CleaningReport:
    """Counts of one run; documents read = kept + dropped.

    Args:
        read: documents read, bad lines included.
        kept: documents written; `written` counts lines, which are more if documents were split, and
            `changed_documents` the kept documents with a changed text.
        text_bytes: bytes of input, uncompressed.
        maximum_examples: examples per reason.
    """

    maximum_examples: int = 3
    read: int = 0
    kept: int = 0
    written: int = 0
    changed_documents: int = 0
    text_bytes: int = 0
    output_bytes: int = 0
    dropped: dict[str, Reason] = field(default_factory=dict)
    changed: dict[str, Reason] = field(default_factory=dict)

    @property
    def dropped_documents(self) -> int:
        return sum(reason.documents for reason in self.dropped.values())

    def drop(self, reason: str, where: str, shown: str, detail: str) -> None:
        self._count(self.dropped, reason, {"where": where, "shown": shown, "detail": detail})

    def change(self, what: str, where: str, before: str, after: str) -> None:
        self._count(self.changed, what, {"where": where, "shown": before, "detail": after})

    def wants_example(self, reason: str) -> bool:
        """Returns True if another example of a dropped document is needed, since creating one may take time."""
        known = self.dropped.get(reason)
        return self.maximum_examples > 0 if known is None else len(known.examples) < self.maximum_examples

    def as_json(self) -> bytes:
        """Returns the report as indented JSON."""
        described: dict[str, Any] = {
            "read": self.read,
            "kept": self.kept,
            "dropped": self.dropped_documents,
            "written": self.written,
            "changed": self.changed_documents,
            "text_bytes": self.text_bytes,
            "output_bytes": self.output_bytes,
        }
        for name, reasons in (("dropped_for", self.dropped), ("changed_by", self.changed)):
            described[name] = {
                reason: {"documents": counted.documents, "examples": counted.examples}
                for reason, counted in sorted(reasons.items())
            }
        return json.dumps(described, indent=2, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"

    def table(self) -> Iterator[str]:
        """Yields lines for a terminal."""
        rows: list[tuple[str, int, Reason | None]]
        rows = [("read", self.read, None), ("kept", self.kept, None), ("dropped", self.dropped_documents, None)]
        rows += [(f"  {name}", counted.documents, counted) for name, counted in sorted(self.dropped.items())]
        if self.changed:
            rows.append(("changed", self.changed_documents, None))
            rows += [(f"  {name}", counted.documents, counted) for name, counted in sorted(self.changed.items())]
        if self.written != self.kept:
            rows.append(("lines written", self.written, None))
        width = max(len(name) for name, *_ in rows)
        digits = max(len(f"{count:,}") for _, count, _ in rows)
        for name, count, counted in rows:
            share = f"{count / self.read:7.2%}" if self.read else "      –"
            yield f"{name:<{width}}  {count:>{digits},}  {share}"
            for example in counted.examples if counted else ():
                detail = f" ({example['detail'][:_EXAMPLE_CHARACTERS]!r})" if example["detail"] else ""
                yield f"    {example['where']}: {example['shown']!r}{detail}"

    def _count(self, reasons: dict[str, Reason], name: str, example: dict[str, str]) -> None:
        counted = reasons.setdefault(name, Reason())
        counted.documents += 1
        if len(counted.examples) < self.maximum_examples:
            counted.examples.append(example)
