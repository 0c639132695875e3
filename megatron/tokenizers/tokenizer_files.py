"""Reading the files that tokenizers consist of, hashing what they say, and the package that many are made with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, DataError, printable
from megatron.files.formats import FIRST_BYTES, recognized
from megatron.files.plain import open_plain, parse_json, read_plain

_FIRST_BYTES = 4096


def read_tokenizer_file(path: str | Path, what: str) -> str:
    """Reads a tokenizer file as UTF-8 text.

    Raises:
        ConfigError: there is no such file.
        DataError: it cannot be read or is not UTF-8.
    """
    content = read_tokenizer_bytes(path, what)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise DataError(f"{path} ({what}) cannot be read as UTF-8 text: {failure}. {way_out(content)}") from failure


def check_tokenizer_file(path: str | Path, what: str, beginning: bytes = b"") -> None:
    """Checks that a tokenizer file can be read, and begins as its format does after white space.

    Raises:
        ConfigError: there is no such file.
        DataError: it cannot be read, or is of another format.
    """
    content = read_tokenizer_bytes(path, what, most_bytes=_FIRST_BYTES).lstrip()
    if not content.startswith(beginning):
        begins = f"begins with {printable(content[:20].decode(errors='replace'))}" if content else "is empty"
        raise DataError(f"{path} ({what}) {begins}; it must begin with {beginning.decode()}. {way_out(content)}")


def read_tokenizer_bytes(path: str | Path, what: str, most_bytes: int | None = None) -> bytes:
    """Reads a tokenizer file.

    Args:
        most_bytes: how much of it; all if None.

    Raises:
        ConfigError: there is no such file.
        DataError: it cannot be read, or is too large for one.
    """
    try:
        if most_bytes is None:
            return read_plain(path)
        with open_plain(path) as stream:
            return stream.read(most_bytes)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as failure:
        raise ConfigError(f"{what} {path} is not a file. Give the path of an existing one.") from failure
    except OSError as failure:
        raise DataError(
            f"{path} ({what}) cannot be read: {failure.strerror}. Fetch or write the file again."
        ) from failure


def read_tokenizer_json(path: str | Path, what: str) -> Any:
    """Reads a tokenizer file of JSON.

    Raises:
        ConfigError: there is no such file.
        DataError: it cannot be read or is not JSON; the text says where.
    """
    text = read_tokenizer_file(path, what)
    try:
        return parse_json(text)
    except ValueError as failure:
        raise DataError(f"{path} is not valid JSON: {failure}. {way_out(text[:FIRST_BYTES].encode())}") from failure


def way_out(content: bytes) -> str:
    """What to do about a tokenizer file that cannot be read, by what its first bytes are."""
    return (recognized(content) or "Fetch or write the file again") + "."


def canonical(content: Any) -> str:
    """JSON in a form that does not depend on white space and the order of keys."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def sha256(text: str) -> str:
    """Hash of a text, hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def require_tokenizers() -> None:
    """Checks that the package `tokenizers`, which a broken environment may lack, is there to be imported.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import tokenizers  # noqa: F401
    except ImportError as failure:
        raise ConfigError(
            "this vocabulary or tokenizer needs the tokenizers package: pip install tokenizers."
        ) from failure
