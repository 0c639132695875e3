"""Declarations in the files next to a `tokenizer.json`, applied like `transformers` does.

Source: transformers 5.24, `_from_pretrained` in `tokenization_utils_base.py` and `__init__` in
`tokenization_utils_tokenizers.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.errors import DataError
from megatron.tokenizers.tokenizer_files import read_tokenizer_json

CONFIG, SPECIAL_MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
# Classes that keep the pre-tokenizer of a byte-level tokenizer.json; the others build a new one.
_KEEP_PRE_TOKENIZER = ("", "PreTrainedTokenizer", "TokenizersBackend", "LlamaTokenizer")


def read_declarations(files: Mapping[str, Path]) -> dict[str, Any]:
    """Returns the settings of `tokenizer_config.json`, plus settings of older files if it lists no added tokens.

    Raises:
        DataError: a file is not a JSON object.
    """
    settings = _read(files, CONFIG)
    if "added_tokens_decoder" in settings:
        return settings
    settings |= _read(files, SPECIAL_MAP)
    special = {_content(value) for value in special_tokens(settings)}
    settings["added_tokens_decoder"] = {
        number: {"content": text, "special": text in special, "normalized": text not in special}
        for text, number in _read(files, ADDED).items()
    }
    return settings


def prefix_space_changes(description: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Sets a byte-level description's prefix space to the settings if its class does so; returns True if changed."""
    prefix_space, name = settings.get("add_prefix_space"), str(settings.get("tokenizer_class") or "")
    if not isinstance(prefix_space, bool) or name.removesuffix("Fast") in _KEEP_PRE_TOKENIZER:
        return False
    cutter = description.get("pre_tokenizer") or {}
    stages = [stage for stage in (cutter, *cutter.get("pretokenizers", ())) if stage.get("type") == "ByteLevel"]
    changed = [stage for stage in stages if stage["add_prefix_space"] != prefix_space]
    for stage in changed:
        stage["add_prefix_space"] = prefix_space
    return bool(changed)


def numbered_tokens(settings: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the added tokens by id; the library assigns the next free ids to unknown ones."""
    declared = settings["added_tokens_decoder"]
    yield from (declared[number] for number in sorted(declared, key=int))


def special_tokens(settings: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the tokens with a role, such as `eos_token`, and those listed as special."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    yield from (value for value in named.values() if isinstance(value, (str, dict)))
    yield from extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ()


def add_declared(reference: Any, values: Iterable[Any], where: str, *, special: bool = False) -> None:
    """Adds declared tokens to a `tokenizers.Tokenizer`.

    Args:
        special: add only missing ones, as special tokens.

    Raises:
        DataError: a value does not describe a token.
    """
    from tokenizers import AddedToken

    try:
        known = {token.content for token in reference.get_added_tokens_decoder().values()} if special else ()
        reference.add_tokens(
            [
                AddedToken(**{**_fields(value), **({"special": True} if special else {})})
                for value in values
                if _content(value) not in known
            ]
        )
    except (AttributeError, KeyError, TypeError, ValueError) as failure:
        raise DataError(
            f"{where}: a token declared next to it cannot be read ({failure}). Download its files again, or write them "
            "with save_pretrained."
        ) from failure


def _fields(value: Any) -> dict[str, Any]:
    return {"content": value} if isinstance(value, str) else {name: value[name] for name in value if name != "__type"}


def _content(value: Any) -> str:
    return str(value.get("content") if isinstance(value, dict) else value)


def _read(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    content = read_tokenizer_json(files[name], name) if name in files else {}
    if not isinstance(content, dict):
        raise DataError(f"{files[name]} holds no JSON object. Download or write the file again.")
    return content
