"""Cleaning runs on documents made on the spot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trident.corpus.cleaning.clean_corpus import CleanOutputs, clean_corpus
from trident.corpus.cleaning.cleaning_report import CleaningReport
from trident.corpus.cleaning.documents.clean_options import CleanOptions
from trident.corpus.workers.progress_line import ProgressLine


def quiet() -> ProgressLine:
    """A progress that shows nothing."""
    return ProgressLine(None, 1 << 60, lambda text: None)


def write_jsonl(path: Path, documents: Sequence[Any]) -> Path:
    """One line per document; a string is short for a document with that text."""
    whole = [{"text": document} if isinstance(document, str) else document for document in documents]
    path.write_text("".join(json.dumps(document) + "\n" for document in whole))
    return path


def read_jsonl(path: Path) -> list[Any]:
    """The documents of a file."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def clean_texts(
    folder: Path, documents: Sequence[Any], options: CleanOptions, workers: int = 1, block_bytes: int = 1 << 20
) -> tuple[list[str], CleaningReport]:
    """Cleans documents; gives the texts that stayed and the report."""
    source = write_jsonl(folder / "in.jsonl", documents)
    kept = folder / "kept.jsonl"
    report = clean_corpus([str(source)], CleanOutputs(str(kept)), options, workers, quiet(), block_bytes)
    return [document["text"] for document in read_jsonl(kept)], report
