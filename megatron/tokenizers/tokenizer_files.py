"""Readers and hashes for tokenizer files."""

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
        ConfigError: the file does not exist.
        DataError: the file cannot be read or is not UTF-8.
    """
    content = read_tokenizer_bytes(path, what)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise DataError(f"{path} ({what}) cannot be read as UTF-8 text: {failure}. {file_advice(content)}") from failure


def check_tokenizer_file(path: str | Path, what: str, beginning: bytes = b"") -> None:
    """Checks that a tokenizer file can be read and, after white space, starts with `beginning`.

    Raises:
        ConfigError: the file does not exist.
        DataError: the file cannot be read, or has another format.
    """
    content = read_tokenizer_bytes(path, what, most_bytes=_FIRST_BYTES).lstrip()
    if not content.startswith(beginning):
        begins = f"begins with {printable(content[:20].decode(errors='replace'))}" if content else "is empty"
        raise DataError(f"{path} ({what}) {begins}; it must begin with {beginning.decode()}. {file_advice(content)}")


def read_tokenizer_bytes(path: str | Path, what: str, most_bytes: int | None = None) -> bytes:
    """Reads a tokenizer file.

    Args:
        most_bytes: maximum number of bytes; None for all.

    Raises:
        ConfigError: the file does not exist.
        DataError: the file cannot be read, or is too large.
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
            f"{path} ({what}) cannot be read: {failure.strerror}. Download or write the file again."
        ) from failure


def read_tokenizer_json(path: str | Path, what: str) -> Any:
    """Reads a tokenizer file of JSON.

    Raises:
        ConfigError: the file does not exist.
        DataError: the file cannot be read or is not JSON.
    """
    text = read_tokenizer_file(path, what)
    try:
        return parse_json(text)
    except ValueError as failure:
        raise DataError(f"{path} is not valid JSON: {failure}. {file_advice(text[:FIRST_BYTES].encode())}") from failure


def file_advice(content: bytes) -> str:
    """Returns advice about an unreadable tokenizer file, given its first bytes."""
    return (recognized(content) or "Download or write the file again") + "."


def canonical(content: Any) -> str:
    """Returns JSON independent of white space and key order."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def sha256(text: str) -> str:
    """Returns the SHA-256 of a text, hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def require_tokenizers() -> None:
    """Checks that the package `tokenizers` can be imported.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import tokenizers  # noqa: F401
    except ImportError as failure:
        raise ConfigError(
            "this vocabulary or tokenizer requires the tokenizers package: pip install tokenizers."
        ) from failure
