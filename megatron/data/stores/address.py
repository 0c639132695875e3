"""Addresses of document stores: a URL, or a JSON file with a connection string and the collections.

    sqlite:///corpus.db?table=web,news          a file in this folder; four slashes start an absolute path
    mongodb://host:27017/corpus?collection=web  the database follows the host; other options go to the driver
    db.json, db.json?collection=web             a configuration file, or one of its collections

`column=form` selects another text column than `filt_text`. An address may hold a password: its text is masked
(`megatron/secret_text.py`), and only the driver receives the original.

Source: the configuration file is dsGPT2's, with MONGO_CONNECTION_STRING, MONGO_CONNECTION_DB and COLLECTIONS.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote

from megatron.data.formats.store_names import CONNECTION_KEY, MONGODB, SQLITE, store_configuration
from megatron.errors import ConfigError
from megatron.secret_text import MASK, guarded, masked, reveal

DATABASE_KEY = "MONGO_CONNECTION_DB"
COLLECTIONS_KEY = "COLLECTIONS"
COLUMN_KEY = "TEXT_COLUMN"
_COLLECTION_OPTIONS = ("table", "collection")
_COLUMN_OPTIONS = ("column", "field")
# Must be percent-encoded in a user name and a password; otherwise their end is ambiguous.
_UNESCAPED = re.compile(r"[@/?#\[\]\s]|:.*:|%(?![0-9A-Fa-f]{2})", re.DOTALL)


@dataclass(frozen=True)
class StoreAddress:
    """The location of a document store, and the selected collections and column.

    Args:
        kind: sqlite or mongodb.
        target: path of the file, or the driver's connection string, masked as text.
        database: MongoDB's database; empty for SQLite.
        collections: in the order of their documents; empty for all.
        column: the text column; None for `filt_text` or, if missing, `text`.
        written: as given by the user, without the options parsed here, masked as text.
    """

    kind: str
    target: str
    database: str = ""
    collections: tuple[str, ...] = ()
    column: str | None = None
    written: str = ""

    @staticmethod
    def of(text: str) -> StoreAddress:
        """Reads an address or the path of a configuration file.

        Raises:
            ConfigError: neither, an unknown option, or a password that cannot be separated from the rest.
        """
        text = reveal(text)
        base, collections, column, rest = _split_options(text)
        if base.startswith(SQLITE):
            address = _sqlite_address(base, rest)
        elif base.startswith(MONGODB):
            address = _mongodb_address(base, rest)
        else:
            address = _configured(base, text, rest)
        return replace(address, collections=collections or address.collections, column=column or address.column)

    @property
    def shown(self) -> str:
        """The address without its password, for messages and records."""
        options = [f"{self._option}={','.join(map(quote, self.collections))}"] if self.collections else []
        options += [f"column={quote(self.column)}"] if self.column is not None else []
        if not options:
            return str(self.written)
        return f"{self.written}{'&' if '?' in self.written else '?'}{'&'.join(options)}"

    def check_password(self) -> None:
        """Checks that the password is not masked, as in an address read from a record of a run.

        Raises:
            ConfigError: the password is masked.
        """
        if MASK in reveal(self.target) and type(self.target) is str and self.kind == "mongodb":
            raise ConfigError(
                f"{self.shown} has {MASK} instead of a password: it comes from a record of a run, and records contain "
                "no passwords. Give the complete address, or a configuration file (db.json)."
            )

    def only(self, collection: str) -> str:
        """Returns the address of one collection of the store, guarded if it holds a secret."""
        column = "" if self.column is None else f"&column={quote(self.column)}"
        written = reveal(self.written)
        return guarded(f"{written}{'&' if '?' in written else '?'}{self._option}={quote(collection)}{column}")

    @property
    def _option(self) -> str:
        return "table" if self.written.startswith(SQLITE) else "collection"


def _split_options(text: str) -> tuple[str, tuple[str, ...], str | None, str]:
    """Returns the part before the options, the selected collections and column, and the other options."""
    base, _, query = (text, "", "") if os.path.isfile(text) else text.partition("?")
    collections: list[str] = []
    column = None
    rest = []
    for option in filter(None, query.split("&")):
        name, _, value = option.partition("=")
        if name in _COLLECTION_OPTIONS:
            collections += [unquote(name) for name in value.split(",") if name]
        elif name in _COLUMN_OPTIONS and value:
            column = unquote(value)
        else:
            rest.append(option)
    return base, tuple(collections), column, "&".join(rest)


def _refuse_options(options: str, text: str) -> None:
    if options:
        names = " and ".join(option.partition("=")[0] for option in options.split("&") if "=" in option)
        problem = f"unknown option {names}" if names else "the text after the ? is not an option"
        raise ConfigError(f"{masked(text)}: {problem}. A store's address takes table= (or collection=) and column=.")


def _sqlite_address(base: str, options: str) -> StoreAddress:
    _refuse_options(options, f"{base}?{options}" if options else base)
    path = base.removeprefix(SQLITE)
    if not path.startswith("/") or not path.strip("/"):
        raise ConfigError(
            f"{base} names no file. Use sqlite:///file.db for a file in this folder and sqlite:////folder/file.db for "
            "an absolute path."
        )
    return StoreAddress("sqlite", unquote(path[1:]), written=base)


def _mongodb_address(base: str, options: str, database: str | None = None) -> StoreAddress:
    written = base + (f"?{options}" if options else "")
    _check_user(written)
    in_path = unquote(base.partition("://")[2].partition("/")[2])
    if not (database or in_path):
        raise ConfigError(f"{masked(base)} names no database. Use mongodb://host:27017/database?collection=name.")
    return StoreAddress("mongodb", guarded(written), database or in_path, written=guarded(written))


def _check_user(written: str) -> None:
    """Checks that the secrets of a connection string can be separated from the rest of it."""
    user, at, _ = written.partition("://")[2].rpartition("@")
    if at and _UNESCAPED.search(user):
        raise ConfigError(
            f"{masked(written)}: the user name, the password or an option contains a character that must be "
            "percent-encoded. Use %40 for @, %3A for :, %2F for /, %3F for ?, %23 for # and %25 for %."
        )


def _configured(path: str, text: str, options: str) -> StoreAddress:
    _refuse_options(options, text)
    content = store_configuration(path)
    if content is None:
        raise ConfigError(
            f"{masked(text)} is not a document store: neither sqlite:///file.db nor mongodb://host/database nor a JSON "
            f"file with the keys {CONNECTION_KEY}, {DATABASE_KEY} and {COLLECTIONS_KEY}."
        )
    problems = _config_problems(path, content)
    if problems:
        raise ConfigError(problems)
    base, collections, column, rest = _split_options(content[CONNECTION_KEY])
    if base.startswith(SQLITE):
        address = _sqlite_address(base, rest)
    elif base.startswith(MONGODB):
        address = _mongodb_address(base, rest, content.get(DATABASE_KEY))
    else:
        raise ConfigError(
            f"{path}: {CONNECTION_KEY} {masked(base)!r} is not an address. Use mongodb://host:27017 or "
            "sqlite:///file.db."
        )
    return replace(
        address,
        collections=tuple(content.get(COLLECTIONS_KEY) or collections),
        column=content.get(COLUMN_KEY, column),
        written=path,
    )


def _config_problems(path: str, content: dict[str, Any]) -> list[str]:
    known = (CONNECTION_KEY, DATABASE_KEY, COLLECTIONS_KEY, COLUMN_KEY)
    problems = [f"{path}: unknown key {key!r}. Use {', '.join(known)}." for key in content if key not in known]
    for key in (CONNECTION_KEY, DATABASE_KEY, COLUMN_KEY):
        if not isinstance(content.get(key, ""), str):
            value = "another kind of value" if key == CONNECTION_KEY else repr(content[key])
            problems.append(f"{path}: {key} holds {value}; it must be a string.")
    names = content.get(COLLECTIONS_KEY, [])
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        problems.append(
            f'{path}: {COLLECTIONS_KEY} holds {names!r}; it must be a list of names, as in ["web", "news"].'
        )
    elif len(set(names)) != len(names):
        problems.append(f"{path}: {COLLECTIONS_KEY} lists a collection twice: {', '.join(names)}. List each once.")
    return problems
