"""The tokenizer's files of a model directory: found and copied on the way in, written on the way out."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.storage import Storage, cannot_write
from megatron.convert.hugging_face.proof import REAL_TEXTS
from megatron.convert.hugging_face.reference import fast_tokenizer_description, tokenizer_ids
from megatron.convert.hugging_face.weight_files import read_json_file
from megatron.convert.hugging_face.weight_output import write_json
from megatron.errors import ConfigError, ConversionError
from megatron.tokenizers.library import LibraryTokenizer
from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
# What describes a tokenizer; any of the first group is one.
_TOKENIZERS = (TOKENIZER_JSON, "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_BESIDE = (
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION_CONFIG,
)
_LONGEST_TEXT = 10**30  # what transformers writes where a tokenizer has no limit


def copy_tokenizer(source: Path, target: Path) -> TokenizerChoice:
    """Copies the tokenizer of a model directory into a new folder and returns the flags that choose it there.

    Raises:
        ConversionError: the directory has no tokenizer, or it cannot be read.
        StorageError: a file cannot be copied.
    """
    if not any((source / name).is_file() for name in _TOKENIZERS):
        raise ConversionError(
            f"{source} has no tokenizer ({', '.join(_TOKENIZERS[:3])}, ...), so the token ids of the model have no "
            "meaning. Name one with --tokenizer-name-or-path, a folder with tokenizer.json."
        )
    _copy(source, target, (*_TOKENIZERS, *_BESIDE))
    if not (target / TOKENIZER_JSON).exists():
        write_json(target / TOKENIZER_JSON, fast_tokenizer_description(source))
    _name_class(target)
    return TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(target))


def write_tokenizer(choice: TokenizerChoice, tokenizer: LibraryTokenizer, target: Path, max_length: int) -> None:
    """Writes the tokenizer of a checkpoint into a model directory.

    Args:
        max_length: positions of the model, in tokens.

    Raises:
        ConversionError: its library has no form that transformers reads.
        StorageError: a file cannot be written.
    """
    source = Path(choice.tokenizer_name_or_path or "")
    if choice.tokenizer_type in ("PretrainedFromHF", "HFTokenizer") and source.is_dir():
        _copy(source, target, (*_TOKENIZERS, *_BESIDE))
    description = tokenizer.description
    if description is None:
        raise ConversionError(
            f"the tokenizer {tokenizer.name} ({choice.tokenizer_type}) is defined by a library that transformers does "
            "not read a file of. Give --tokenizer-name-or-path FOLDER, a Hugging Face form of it with tokenizer.json."
        )
    described = json.loads(description)
    eod = _end_of_document(tokenizer)
    if not (target / TOKENIZER_JSON).exists():
        if eod is not None:
            described["added_tokens"] = _with_special_token(described.get("added_tokens") or [], eod, tokenizer)
        write_json(target / TOKENIZER_JSON, described)
    if not (target / TOKENIZER_CONFIG).exists():
        named = {} if eod is None else dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), eod)
        write_json(
            target / TOKENIZER_CONFIG,
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": max_length,
                "clean_up_tokenization_spaces": False,
                **named,
            },
        )


def special_ids(folder: Path, tokenizer: Tokenizer) -> dict[str, int]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id` of a folder's tokenizer, those that it names."""
    described = read_json_file(folder / TOKENIZER_JSON, "the tokenizer")
    named = read_json_file(folder / TOKENIZER_CONFIG, "the tokenizer's configuration")
    ids = {str(entry.get("content")): entry.get("id") for entry in described.get("added_tokens") or []}
    vocabulary = (described.get("model") or {}).get("vocab")
    found: dict[str, int] = {}
    for kind in ("bos", "eos", "pad"):
        token = named.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        number = ids.get(str(token), vocabulary.get(token) if isinstance(vocabulary, dict) and token else None)
        if isinstance(number, int):
            found[f"{kind}_token_id"] = number
    if (folder / GENERATION_CONFIG).exists():  # models may name ids that their tokenizer does not add by itself
        given = read_json_file(folder / GENERATION_CONFIG, "the settings of generation")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if isinstance(given.get(name), int):
                found.setdefault(name, given[name])
    if "eos_token_id" not in found:
        with contextlib.suppress(ConfigError):  # it may have none
            found["eos_token_id"] = tokenizer.eod_id
    return found


def special_tokens_from(folder: Path, first: int) -> int:
    """How many of a tokenizer's ids from `first` on, without a gap, are tokens that were added to its vocabulary."""
    described = read_json_file(folder / TOKENIZER_JSON, "the tokenizer")
    added = {entry.get("id") for entry in described.get("added_tokens") or []}
    count = 0
    while first + count in added:
        count += 1
    return count


def write_generation_config(folder: Path, ids: Mapping[str, int]) -> None:
    """Writes `generation_config.json` where the model came with none.

    Raises:
        StorageError: it cannot be written.
    """
    if not (folder / GENERATION_CONFIG).exists():
        write_json(folder / GENERATION_CONFIG, {"_from_model_config": True, **ids})


def check_same_ids(folder: Path, tokenizer: Tokenizer) -> None:
    """Checks that `AutoTokenizer` gives the ids of our tokenizer.

    Raises:
        ConversionError: it gives others, or cannot load it.
    """
    texts = [*REAL_TEXTS, "".join(REAL_TEXTS)]
    for text, theirs in zip(texts, tokenizer_ids(folder, texts), strict=True):
        ours = tokenizer.encode(text)
        if ours != theirs:
            raise ConversionError(
                f"the tokenizer in {folder} gives {text[:30]!r}... the ids {theirs[:8]} in transformers and "
                f"{ours[:8]} here, so a text would not mean the same to the model. Name another form of the tokenizer "
                "with --tokenizer-name-or-path, a folder with tokenizer.json."
            )


def _name_class(folder: Path) -> None:
    """Has the folder's configuration name a class, which transformers else takes from the model's `config.json`."""
    path = folder / TOKENIZER_CONFIG
    named = read_json_file(path, "the tokenizer's configuration") if path.exists() else {}
    if "tokenizer_class" not in named:
        path.unlink(missing_ok=True)
        write_json(path, {"tokenizer_class": "PreTrainedTokenizerFast", **named})


def _end_of_document(tokenizer: LibraryTokenizer) -> str | None:
    try:
        return tokenizer.decode([tokenizer.eod_id])
    except ConfigError:
        return None


def _with_special_token(added: list[dict[str, Any]], token: str, tokenizer: LibraryTokenizer) -> list[dict[str, Any]]:
    if any(entry.get("content") == token for entry in added):
        return added
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [*added, {"id": tokenizer.eod_id, "content": token, **flags, "special": True}]


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    storage = Storage()
    for name in names:
        if (source / name).is_file():
            try:
                shutil.copyfile(source / name, target / name)
            except OSError as failure:
                size_bytes = (source / name).stat().st_size
                raise cannot_write(storage, target / name, size_bytes, failure) from failure
