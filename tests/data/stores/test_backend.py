"""The interface of databases: both kinds have it."""

from __future__ import annotations

import pytest

from megatron.data.stores.backend import StoreBackend
from megatron.data.stores.mongodb import MongoCollections
from megatron.data.stores.sqlite import SqliteCollections


@pytest.mark.parametrize("kind", [SqliteCollections, MongoCollections])
def test_every_database_has_the_interface(kind: type) -> None:
    wanted = {name for name in vars(StoreBackend) if not name.startswith("_")}
    assert {"names", "facts", "scan", "count"} <= wanted
    assert not [name for name in wanted if not callable(getattr(kind, name, None))]
