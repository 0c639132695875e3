"""Addresses of document stores, and JSON files that contain them."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.data.formats.store_names import is_store_address
from megatron.data.sources.source import SourceUse
from megatron.data.sources.source_kinds import open_source
from megatron.data.stores.address import StoreAddress
from megatron.data.stores.document_store import open_store
from megatron.errors import ConfigError
from megatron.secret_text import reveal
from tests.data.databases import NEWS, WEB, Database, write_web_and_news


def test_addresses(tmp_path: Path) -> None:
    assert StoreAddress.of("sqlite:///a%20b.db?table=web,news&table=x%2Cy&column=form") == StoreAddress(
        "sqlite", "a b.db", "", ("web", "news", "x,y"), "form", "sqlite:///a%20b.db"
    )
    mongo = StoreAddress.of("mongodb://me:pw@host:1,other:2/corpus?authSource=admin&collection=web")
    assert (reveal(mongo.target), mongo.database, mongo.collections) == (
        "mongodb://me:pw@host:1,other:2/corpus?authSource=admin",
        "corpus",
        ("web",),
    )
    assert mongo.shown == "mongodb://me:***@host:1,other:2/corpus?authSource=admin&collection=web"
    assert StoreAddress.of(mongo.only("n,s")).collections == ("n,s",) and "pw" not in repr(mongo)
    assert reveal(mongo.only("n,s")) == "mongodb://me:pw@host:1,other:2/corpus?authSource=admin&collection=n%2Cs"
    path = tmp_path / "db.json"
    path.write_text(
        json.dumps(
            {
                "MONGO_CONNECTION_STRING": "mongodb://h:1",
                "MONGO_CONNECTION_DB": "korean",
                "COLLECTIONS": ["web", "news"],
            }
        )
    )
    configured = StoreAddress.of(str(path))
    assert (configured.target, configured.database, configured.collections) == (
        "mongodb://h:1",
        "korean",
        ("web", "news"),
    )
    assert StoreAddress.of(configured.only("news")).collections == ("news",) and configured.only("news").startswith(
        str(path)
    )
    (tmp_path / "line.json").write_text('{"text": "a"}')
    assert [
        is_store_address(text) for text in ("sqlite:///x", "mongodb+srv://h/d", str(path), configured.only("web"))
    ] == [True] * 4
    assert not any(is_store_address(text) for text in ("x.jsonl", "-", str(tmp_path), str(tmp_path / "line.json")))


def test_a_configuration_file_may_name_a_sqlite_file(sqlite_database: Database, tmp_path: Path) -> None:
    write_web_and_news(sqlite_database)
    path = tmp_path / "db.json"
    path.write_text(json.dumps({"MONGO_CONNECTION_STRING": sqlite_database.base, "COLLECTIONS": ["news", "web"]}))
    assert list(open_store(str(path))) == NEWS + WEB
    assert list(open_store(f"{path}?collection=news")) == NEWS


def test_an_address_from_a_record_is_read_but_not_opened() -> None:
    for text in ("mongodb://me:***@host/corpus", "mongodb://host/corpus?proxyPassword=***"):
        address = StoreAddress.of(text)
        assert address.database == "corpus"
        with pytest.raises(ConfigError, match=r"has \*\*\* instead of a password: it comes from a record"):
            open_store(address)
        with pytest.raises(ConfigError, match=r"Give the complete address, or a configuration file"):
            open_source(text).check(SourceUse(8))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sqlite://file.db", r"sqlite://file\.db names no file\. Use sqlite:///file\.db"),
        ("sqlite:///", r"sqlite:/// names no file"),
        ("sqlite:///f.db?tabel=web", r"sqlite:///f\.db\?tabel=\*\*\*: unknown option tabel"),
        ("mongodb://u:pw@host?collection=web", r"mongodb://u:\*\*\*@host names no database"),
        ("mongodb://u:p@w@host/d", r"mongodb://u:\*\*\*@host/d: the user name, the password .* Use %40 for @"),
        ("mongodb://u:100%@host/d", r"mongodb://u:\*\*\*@host/d: .* and %25 for %"),
        ("corpus.jsonl", r"corpus\.jsonl is not a document store"),
    ],
)
def test_wrong_addresses(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StoreAddress.of(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"COLLECTIONS": "web"}, r"COLLECTIONS holds 'web'; it must be a list of names"),
        ({"COLLECTIONS": ["web", "web"]}, r"COLLECTIONS lists a collection twice: web, web"),
        ({"MONGO_CONNECTION_DB": 5}, r"MONGO_CONNECTION_DB holds 5; it must be a string"),
        ({"COLLECTION": ["web"]}, r"unknown key 'COLLECTION'"),
        ({"MONGO_CONNECTION_STRING": "redis://h"}, r"MONGO_CONNECTION_STRING 'redis://h' is not an address"),
        ({"MONGO_CONNECTION_STRING": "mongodb://h"}, r"mongodb://h names no database"),
    ],
)
def test_wrong_configuration_files(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "db.json"
    path.write_text(json.dumps({"MONGO_CONNECTION_STRING": "sqlite:///f.db", **content}))
    with pytest.raises(ConfigError, match=message):
        StoreAddress.of(str(path))
