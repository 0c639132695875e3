"""Imports into document stores, and what the stores then hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.data.stores.address import StoreAddress
from megatron.data.stores.document_store import open_backend, open_store
from tests.data.databases import Database
from tests.trident.corpus.preprocess_runs import quiet
from trident.corpus.stores.importing import ImportOptions, ImportResult, import_files
from trident.corpus.stores.inspection import audit
from trident.corpus.stores.writers import open_writer


def jsonl(path: Path, texts: list[Any], key: str = "text", **others: str) -> str:
    """Writes a jsonl file with a line for each text; every line also holds the other keys."""
    path.write_text("".join(json.dumps({key: text, **others}) + "\n" for text in texts))
    return str(path)


def put(database: Database, collection: str, *paths: str, **options: Any) -> list[ImportResult]:
    """Imports files into a collection; `takes_over` goes to the writer, other options to the import."""
    writer = open_writer(StoreAddress.of(database.base), collection, options.pop("takes_over", False))
    try:
        return list(import_files(paths, writer, collection, ImportOptions(**options), quiet()))
    finally:
        writer.close()


def texts_of(database: Database, *collections: str) -> list[str]:
    """All documents of these collections."""
    return list(open_store(database.address(*collections)))


def problems_of(database: Database, *names: str) -> dict[str, list[str]]:
    """What an audit finds wrong with each collection."""
    return {found.name: found.problems for found in audit(open_backend(StoreAddress.of(database.base)), names)}
