"""Recognizes a document store by its name, without importing `data/stores`."""

from __future__ import annotations

import os
from typing import Any

from megatron.errors import ConfigError
from megatron.files.settings import read_json
from megatron.secret_text import reveal

CONNECTION_KEY = "MONGO_CONNECTION_STRING"
SQLITE = "sqlite://"
MONGODB = ("mongodb://", "mongodb+srv://")
_LONGEST_CONFIGURATION_BYTES = 1 << 16


def is_store_address(text: str) -> bool:
    """Returns True if a text names a document store: by its scheme, or a JSON file by its keys."""
    text = reveal(text)
    if text.startswith((SQLITE, *MONGODB)):
        return True
    if os.path.isfile(text):
        return store_configuration(text) is not None
    base = text.rpartition("?")[0]
    return base.endswith(".json") and os.path.isfile(base) and store_configuration(base) is not None


def store_configuration(path: str) -> dict[str, Any] | None:
    """Returns the contents of a store's configuration file; None for any other file."""
    if not path.endswith(".json"):
        return None
    try:
        content = read_json(path, path, most_bytes=_LONGEST_CONFIGURATION_BYTES)
    except ConfigError:
        return None
    return content if isinstance(content, dict) and CONNECTION_KEY in content else None
