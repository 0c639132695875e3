"""Values of `--input`: files, patterns, folders and standard input, and one job's share of them.

Folders and patterns expand to files sorted by name, so that outputs do not depend on the file system.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron import log
from megatron.data.order.index_cache import INDEX_CACHE_FOLDER
from megatron.errors import ConfigError
from trident.corpus.inputs.block import STANDARD_INPUT
from trident.corpus.inputs.compressed import COMPRESSIONS
from trident.corpus.inputs.tables import is_saved_data, is_table, open_table, tables_of

_FOUND_IN_FOLDERS = (".jsonl", ".json", ".ndjson", ".parquet")
_TEXT = ".txt"
_NOMINAL_ROW_BYTES = 1000  # size of a row, compared with bytes of a file, when a job is divided
_ESCAPES = (("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t"))


@dataclass(frozen=True)
class InputPart:
    """A range of an input: the lines that begin in [start, stop), or these rows of a table.

    Args:
        start, stop: stored bytes of the file, or rows; `stop` None is the end.
    """

    path: str
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Shard:
    """One of several equal shards of the inputs, counted from 1."""

    number: int
    count: int

    @staticmethod
    def of(text: str) -> Shard:
        """Reads `i/n`.

        Raises:
            ConfigError: the text is invalid, or i is not from 1 to n.
        """
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise ConfigError(
                f"--shard {text} is not a share. Give i/n with i from 1 to n: --shard 1/8 to --shard 8/8 are the eight "
                "shares of one corpus."
            )
        return Shard(int(number), int(count))

    @property
    def suffix(self) -> str:
        """The suffix of `--output-prefix` that keeps the shares apart and in order."""
        return f"_shard{self.number:0{len(str(self.count))}d}of{self.count}"

    def of_total(self, total: int) -> tuple[int, int]:
        """Returns this share's half-open range of a total."""
        return total * (self.number - 1) // self.count, total * self.number // self.count


def read_separator(text: str) -> str:
    r"""Decodes a value of `--document-separator`: `\n`, `\r` and `\t` stand for the characters."""
    for escape, character in _ESCAPES:
        text = text.replace(escape, character)
    return text


def layout_of(path: str, separator: str | None = None) -> str:
    """Returns the layout of an input's documents by its name: parquet, text, or else jsonl.

    This is the only rule for file names. A name that ends in .txt, optionally followed by .gz and the like, is plain
    text: each line is a document, unless a separator is given. Standard input has no name: it is plain text with a
    separator, and JSON lines otherwise.
    """
    name = Path(path)
    suffix = Path(name.stem).suffix.lower() if name.suffix.lower() in COMPRESSIONS else name.suffix.lower()
    if name.suffix.lower() == ".parquet":
        return "parquet"
    return "text" if suffix == _TEXT or (separator is not None and path == STANDARD_INPUT) else "jsonl"


def expand_inputs(inputs: Sequence[str], separator: str | None = None) -> tuple[str, ...]:
    """Expands the values of `--input` to files and tables, in order: folders, patterns and stores to their contents.

    Args:
        separator: of documents in plain text. The .txt files of a folder are included with a separator, or if it holds
            no other inputs: next to these, .txt files are rarely part of a corpus (merges.txt, LICENSE.txt).

    Raises:
        ConfigError: listing all patterns and folders without files, or a folder belongs to the datasets library.
    """
    expanded: list[str] = []
    problems = []
    for value in inputs:
        if is_table(value):
            files = tables_of(value)
        elif os.path.isdir(value):
            files = _files_below(value, separator)
            if not files:
                problems.append(
                    f"--input {value} is a folder without files that end in {' '.join((*_FOUND_IN_FOLDERS, _TEXT))} "
                    f"(or these with {' '.join(COMPRESSIONS)}). List the files, or a pattern like '{value}/*'."
                )
        elif value != STANDARD_INPUT and not os.path.exists(value) and glob.has_magic(value):
            files = list(dict.fromkeys(file for match in _matches(value) for file in _files_of_match(match, separator)))
            if not files:
                problems.append(f"--input {value} matches no file. Check the pattern and the folder.")
        else:
            files = [value]
        expanded.extend(files)
    if problems:
        raise ConfigError(problems)
    return tuple(expanded)


def share_of(paths: Sequence[str], shard: Shard, separator: str | None = None) -> tuple[InputPart, ...]:
    """Returns one shard of the inputs; all shards in order are the inputs, each line once.

    Plain jsonl files are divided by bytes, tables by rows; a compressed, Parquet or plain-text file belongs to the
    shard in whose range it begins.

    Raises:
        ConfigError: an input has no size, so that it cannot be divided.
    """
    problems = [
        "--shard and --partitions divide files; --input "
        f"{'- (standard input)' if path == STANDARD_INPUT else path} is not a file."
        for path in paths
        if path == STANDARD_INPUT or (os.path.exists(path) and not os.path.isfile(path))
    ]
    if problems:
        raise ConfigError(problems)
    tables = {path: open_table(path) for path in paths if is_table(path)}
    sizes = [
        tables[path].rows * _NOMINAL_ROW_BYTES
        if path in tables
        else os.path.getsize(path)
        if os.path.isfile(path)
        else 0
        for path in paths
    ]
    first, last = shard.of_total(sum(sizes))
    parts = []
    offset = 0
    for path, size in zip(paths, sizes, strict=True):
        end = offset + size
        if path in tables:
            start, stop = (-(-max(0, edge - offset) // _NOMINAL_ROW_BYTES) for edge in (first, min(last, end)))
            if start < stop:
                parts.append(InputPart(path, start, stop))
        elif layout_of(path, separator) == "jsonl" and Path(path).suffix.lower() not in COMPRESSIONS:
            start, stop = max(first, offset) - offset, min(last, end) - offset
            if start < stop:
                parts.append(InputPart(path, start, None if stop == size else stop))
        elif first <= offset < last:
            parts.append(InputPart(path))
        offset = end
    return tuple(parts)


def _matches(pattern: str) -> list[str]:
    """Returns the sorted matches of a pattern; `**` descends into folders but not links, which may form a cycle."""
    if "**" not in pattern:
        return sorted(glob.glob(pattern))
    parts = Path(pattern).parts
    plain = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    matches = Path(*parts[:plain]).glob(os.path.join(*parts[plain:]))
    return sorted(str(path) for path in matches if not any(part.startswith(".") for part in path.parts[plain:]))


def _files_of_match(match: str, separator: str | None) -> list[str]:
    return _files_below(match, separator) if os.path.isdir(match) else [match]


def _files_below(folder: str, separator: str | None) -> list[str]:
    """Returns the inputs below a folder, except files that preprocessing writes next to token files."""
    endings = tuple(suffix + packed for suffix in _FOUND_IN_FOLDERS for packed in ("", *COMPRESSIONS))
    paths: list[str] = []
    texts: list[str] = []
    others: Counter[str] = Counter()
    for path, folders, names in os.walk(folder):
        if is_saved_data(path):
            raise ConfigError(f"--input {path} is a dataset written by save_to_disk. Use --input hf://{path}.")
        folders[:] = [name for name in folders if not name.startswith(".") and name != INDEX_CACHE_FOLDER]
        ours = {name.removesuffix(".idx") + ".json" for name in names if name.endswith(".idx")}
        for name in names:
            if name.startswith(".") or name in ours or name.endswith((".idx", ".bin")):
                continue
            if name.lower().endswith(endings):
                paths.append(os.path.join(path, name))
            elif layout_of(name) == "text":
                texts.append(os.path.join(path, name))
            else:
                others[Path(name).suffix or name] += 1
    if separator is not None or not paths:
        paths += texts
    else:
        others.update(Path(name).suffix for name in texts)
    if paths and others:
        shown = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common(8))
        log.info(f"{folder}: {others.total()} files that are not inputs are skipped ({shown}).")
    return sorted(paths)
