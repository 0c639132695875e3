"""Reading untrusted settings files (JSON, YAML), bounded in size, depth, number of values and time.

All files of flags are read here. Special files, YAML aliases that expand too far, and text that cannot be part of a
path or record are refused with a `ConfigError` before anything is built from them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from megatron.errors import ConfigError
from megatron.files.plain import read_plain
from megatron.secret_text import masked

MOST_BYTES = 4 << 20
MOST_YAML_BYTES = 512 << 10  # PyYAML reads about 300 KB a second
MOST_VALUES = 100_000
MOST_YAML_VALUES = 20_000
MOST_LEVELS = 32
_LONGEST_NUMBER = 400  # characters of a number in YAML, whose parsing takes quadratic time
_LONGEST_REASON = 300
_LONGEST_SHOWN = 60
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MERGE_TAG = "tag:yaml.org,2002:merge"


def read_text(path: str, name: str, most_bytes: int = MOST_BYTES) -> str:
    """The text of a regular file.

    Args:
        name: the flag and the path, for error messages.
        most_bytes: a larger file is refused without reading it.

    Raises:
        ConfigError: it cannot be read, is not a regular file, is too large, or is not UTF-8.
    """
    try:
        content = read_plain(path, most_bytes)
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise ConfigError(f"{name} cannot be read: {reason}. Use a readable file.") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        raise ConfigError(f"{name} is not UTF-8 text: {failure.reason} at byte {failure.start}.") from None
    if "\0" in text:
        raise ConfigError(
            f"{name} contains a NUL character at position {text.index(chr(0))}. It is damaged, or not a text file."
        )
    return text


def read_json(path: str, name: str, most_bytes: int = MOST_BYTES) -> Any:
    """The contents of a JSON file.

    Raises:
        ConfigError: see `read_text`; or it is not JSON, has duplicate keys, too many, too deep or invalid values.
    """
    text = read_text(path, name, most_bytes)
    values = sum(map(text.count, "[{,"))
    if values > MOST_VALUES:
        raise ConfigError(f"{name} has about {values:,} values; at most {MOST_VALUES:,} are allowed.")
    try:
        tree = json.loads(text, object_pairs_hook=without_repeats(lambda key: _repeated_key(name, key)))
    except RecursionError:
        raise ConfigError(_depth_text(name)) from None
    except ValueError as failure:
        raise ConfigError(f"{name} is not JSON: {failure}. Fix the file.") from None
    check_values(tree, name)
    return tree


def without_repeats(refuse: Callable[[str], Exception]) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """An `object_pairs_hook` for JSON parsers that refuses duplicate keys.

    Args:
        refuse: creates the error for a duplicate key.
    """

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise refuse(key)
            values[key] = value
        return values

    return build


def read_yaml(path: str, name: str) -> Any:
    """The contents of a YAML file.

    Raises:
        ConfigError: see `read_json` (values count at each use of an alias); or PyYAML is missing.
    """
    text = read_text(path, name, MOST_YAML_BYTES)
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"{name}: YAML requires PyYAML. Run pip install pyyaml, or use a .json file.") from None

    class BoundedLoader(yaml.SafeLoader):
        """Refuses a document during composition, before any value is constructed."""

        nodes = 0
        level = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.nodes += 1
            self.level += 1
            if self.nodes > MOST_YAML_VALUES:
                raise ConfigError(f"{name} has more than {MOST_YAML_VALUES:,} values.")
            if self.level > MOST_LEVELS:
                raise ConfigError(_depth_text(name))
            try:
                return super().compose_node(parent, index)
            finally:
                self.level -= 1

    try:
        loader = BoundedLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _expanded(node, name, {})
        tree = loader.construct_document(node)
    except RecursionError:
        raise ConfigError(_depth_text(name)) from None
    except (yaml.YAMLError, ValueError, OverflowError) as failure:
        raise ConfigError(f"{name} is not YAML: {_reason(failure)}. Fix the file.") from None
    check_values(tree, name)
    return tree


def _reason(failure: Exception) -> str:
    """The problem with a YAML file, without PyYAML's excerpt, which may contain a password."""
    problem, mark = getattr(failure, "problem", None), getattr(failure, "problem_mark", None)
    if problem is None:
        return " ".join(str(failure).split()).partition(": '")[0][:_LONGEST_REASON]
    context = getattr(failure, "context", None)
    position = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return masked(f"{context + ', ' if context else ''}{problem}{position}"[:_LONGEST_REASON])


def check_values(tree: Any, name: str) -> None:
    """Checks that the values of a file can be part of records and paths.

    Raises:
        ConfigError: a string contains a NUL or an unpaired surrogate, or values are nested too deeply.
    """
    for value, level in every_value(tree):
        if isinstance(value, str) and (unusable := _UNUSABLE.search(value)):
            letter = "a NUL" if unusable.group() == "\0" else f"the unpaired surrogate U+{ord(unusable.group()):04X}"
            raise ConfigError(f'{name}: "{_shown(value)}" contains {letter}, which is not allowed.')
        if level > MOST_LEVELS + 1:
            raise ConfigError(_depth_text(name))


def every_value(tree: Any) -> Iterator[tuple[Any, int]]:
    """Yields each value in a tree of lists and objects, including keys, with its level (1 for the root)."""
    waiting: list[Iterator[Any]] = [iter((tree,))]
    while waiting:
        level = len(waiting)
        for value in waiting[-1]:
            yield value, level
            if isinstance(value, dict):
                waiting.append(itertools.chain.from_iterable(value.items()))
                break
            if isinstance(value, (list, tuple, set, frozenset)):
                waiting.append(iter(value))
                break
        else:
            waiting.pop()


def _expanded(node: Any, name: str, sizes: dict[int, int]) -> int:
    """The number of values that a YAML node expands to; also checks its keys and numbers.

    An alias refers to an earlier node, whose size is known, or an enclosing one: recursion is as deep as the document.

    Args:
        sizes: sizes of the nodes seen so far, by identity; 0 while a node is being visited.
    """
    size = sizes.get(id(node))
    if size == 0:
        raise ConfigError(f"{name} has an alias (*name) inside its own definition.")
    if size is not None:
        return size
    sizes[id(node)] = 0
    _check_node(node, name)
    items = node.value if isinstance(node.value, list) else ()
    inner = itertools.chain.from_iterable(item if isinstance(item, tuple) else (item,) for item in items)
    size = sizes[id(node)] = 1 + sum(_expanded(one, name, sizes) for one in inner)
    if size > MOST_YAML_VALUES:
        raise ConfigError(
            f"{name} expands to more than {MOST_YAML_VALUES:,} values (aliases, *name, count each time they are used)."
        )
    return size


def _check_node(node: Any, name: str) -> None:
    if isinstance(node.value, str):
        if node.tag in _NUMBER_TAGS and len(node.value) > _LONGEST_NUMBER:
            raise ConfigError(f"{name} has a number of {len(node.value):,} digits: {_shown(node.value)}")
        return
    keys: set[str] = set()
    for item in node.value:
        if isinstance(item, tuple) and isinstance(item[0].value, str) and item[0].tag != _MERGE_TAG:
            if item[0].value in keys:
                raise _repeated_key(name, item[0].value)
            keys.add(item[0].value)


def _repeated_key(name: str, key: str) -> ConfigError:
    return ConfigError(f'{name} has the key "{_shown(key)}" twice. Remove one.')


def _depth_text(name: str) -> str:
    return f"{name} has values more than {MOST_LEVELS} levels deep. Is it the right file?"


def _shown(text: str) -> str:
    text = masked(text)
    return ascii(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...")[1:-1]
