"""Names of Parquet windows: a file, a pattern, or the path before the shard number in `<path>-00000-of-00003`.

Source: the names follow Apache Beam's `WriteToParquet`, from jax-lm-training's `preprocess.py`.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence

from megatron.errors import DataError

_SHARD_NAME = re.compile(r"(?P<path>.*)-(?P<number>\d{5,})-of-(?P<count>\d{5,})(?P<suffix>\.parquet)?", re.DOTALL)


def shard_name(path: str, number: int, count: int) -> str:
    """Returns the name of a shard, given its index and the number of shards."""
    return f"{path}-{number:05d}-of-{count:05d}"


def is_shard_of(path: str, candidate: str) -> bool:
    """Returns True if a file is named as a shard of an output path, for any number of shards."""
    shard = _SHARD_NAME.fullmatch(candidate)
    return shard is not None and shard["path"] == path


def names_windows(value: str) -> bool:
    """Returns True if a value of `--data-path` refers to Parquet windows: a file, a pattern, or a path of shards."""
    if os.path.exists(f"{value}.idx"):
        return False
    if value.endswith(".parquet"):
        return True
    return any(_SHARD_NAME.fullmatch(path) or path.endswith(".parquet") for path in _matches(value))


def expand_windows(values: Sequence[str]) -> tuple[str, ...]:
    """Returns the files that values of `--data-path` or `--windows` refer to, in the order of their rows.

    A value is a file, a pattern, or the path before the shard number (`out/wt.train`).

    Raises:
        DataError: no file matches, shards are missing, or shards of two runs are mixed.
    """
    paths: list[str] = []
    for value in values:
        matches = _matches(value)
        if not matches:
            raise DataError(
                f"{value} matches no Parquet file: no such file, no match as a pattern, and no "
                f"{shard_name(value, 0, 1)[:-5]}NNNNN. Give a file, a pattern, or the --output-path of "
                "tools/corpus/featurize.py."
            )
        if matches != [value]:
            _check_complete(value, matches)
        paths.extend(sorted(matches, key=_shard_order))
    return tuple(paths)


def _matches(value: str) -> list[str]:
    if os.path.isfile(value):
        return [value]
    if glob.has_magic(value):
        return [path for path in glob.glob(value) if os.path.isfile(path)]
    pattern = f"{glob.escape(value)}-[0-9]*-of-[0-9]*"
    return [path for path in glob.glob(pattern) if is_shard_of(value, path)]


def _shard_order(path: str) -> tuple[str, int]:
    shard = _SHARD_NAME.fullmatch(path)
    return (path, 0) if shard is None else (shard["path"], int(shard["number"]))


def _check_complete(value: str, paths: list[str]) -> None:
    """Checks that the shards among the files are complete."""
    numbers: dict[str, dict[int, set[int]]] = {}
    for path in paths:
        shard = _SHARD_NAME.fullmatch(path)
        if shard is not None:
            numbers.setdefault(shard["path"], {}).setdefault(int(shard["count"]), set()).add(int(shard["number"]))
    for path, counts in numbers.items():
        if len(counts) > 1:
            raise DataError(
                f"{value} matches shards of {len(counts)} runs: {path} in {' and in '.join(map(str, sorted(counts)))} "
                "shards. Remove the unwanted ones, or name the files of one run."
            )
        for count, present in counts.items():
            missing = next((number for number in range(count) if number not in present), None)
            if missing is not None:
                raise DataError(
                    f"{shard_name(path, missing, count)} is missing: {len(present)} of {count} shards exist. Restore "
                    "it, or featurize the corpus again; name single files to read only those."
                )
