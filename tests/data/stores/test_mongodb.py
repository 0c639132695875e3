"""MongoDB servers that cannot be reached, and a missing driver."""

import sys

import pytest

from megatron.data.stores.document_store import open_store
from megatron.errors import ConfigError, StorageError


def test_an_unreachable_server_is_reported() -> None:
    with pytest.raises(StorageError, match=r"mongodb://u:\*\*\*@127\.0\.0\.1:9/corpus cannot be reached"):
        open_store("mongodb://u:secret@127.0.0.1:9/corpus?serverSelectionTimeoutMS=50")


def test_a_wrong_connection_string_and_a_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"mongodb://host:99999/corpus: Port must be an integer"):
        open_store("mongodb://host:99999/corpus")
    monkeypatch.setitem(sys.modules, "pymongo", None)
    with pytest.raises(ConfigError, match=r"mongodb://host/corpus requires the pymongo package: pip install pymongo"):
        open_store("mongodb://host/corpus")
