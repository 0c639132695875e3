"""Copies the tokenizer files of a model directory for an import, and writes them for an export."""

from __future__ import annotations

import contextlib
import json
import shutil
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron import log
from megatron.checkpoint.storage import DISK, cannot_write, write_text
from megatron.config.sections.data import WORDPIECE_TOKENIZERS
from megatron.errors import ConfigError, ConversionError
from megatron.tokenizers.chat import ASSISTANT, USER, ChatTemplate
from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice
from trident.convert.hugging_face.proof_batches import REAL_TEXTS
from trident.convert.hugging_face.reference import SPECIAL_IDS, fast_tokenizer_description, loaded_tokenizer
from trident.convert.hugging_face.table.family import Family
from trident.convert.hugging_face.weight_files import read_json_file, write_json

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
VOCABULARY = "vocab.txt"
# Any of these files defines a tokenizer.
_TOKENIZERS = (TOKENIZER_JSON, "tokenizer.model", "spiece.model", "vocab.json", VOCABULARY)
_COMPANIONS = (
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    CHAT_TEMPLATE,
    "chat_template.json",
    GENERATION_CONFIG,
)
# BERT's special tokens, by their names in a tokenizer's configuration.
_WORDPIECE_NAMES: Mapping[str, str] = types.MappingProxyType(
    {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
)
_OUTER_TOKENS = ("cls_token", "sep_token")
_LONGEST_TEXT = 10**30  # transformers' value for an unlimited tokenizer


def copy_tokenizer(source: Path, target: Path) -> TokenizerChoice:
    """Copies the tokenizer of a model directory into a new folder and returns the flags that select it.

    Raises:
        ConversionError: the directory has no tokenizer, or it cannot be read.
        StorageError: a file cannot be copied.
    """
    if not any((source / name).is_file() for name in _TOKENIZERS):
        raise ConversionError(
            f"{source} has no tokenizer ({', '.join(_TOKENIZERS[:3])}, ...), so the token ids of the model have no "
            "meaning. Name one with --tokenizer-name-or-path, a folder with tokenizer.json, or import only the weights "
            "with --no-tokenizer."
        )
    _copy(source, target, (*_TOKENIZERS, *_COMPANIONS))
    _set_class(source, target)
    if not (target / TOKENIZER_JSON).exists():
        write_json(target / TOKENIZER_JSON, fast_tokenizer_description(source))
    return TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(target))


def name_special_tokens(source: Path, target: Path) -> None:
    """Adds the special tokens to a copied tokenizer's configuration: older models define them only in their class.

    Raises:
        ConversionError: transformers cannot load the tokenizer.
    """
    path = target / TOKENIZER_CONFIG
    named = read_json_file(path, "the tokenizer's configuration")
    with loaded_tokenizer(source) as theirs:
        defaults = {name: str(token) for name, token in theirs.special_tokens_map.items() if isinstance(token, str)}
        inputs = list(theirs.model_input_names)
    _rewrite(path, {"model_input_names": inputs, **defaults, **named})


def write_tokenizer(choice: TokenizerChoice, tokenizer: Tokenizer, target: Path, max_length: int) -> None:
    """Writes the tokenizer of a checkpoint into a model directory.

    Args:
        max_length: positions of the model, in tokens.

    Raises:
        ConversionError: transformers cannot read any form of it.
        StorageError: a file cannot be written.
    """
    source = Path(choice.tokenizer_name_or_path or "")
    if choice.tokenizer_type in ("PretrainedFromHF", "HFTokenizer") and source.is_dir():
        _copy(source, target, (*_TOKENIZERS, *_COMPANIONS))
    description = tokenizer.description
    if description is None:
        raise ConversionError(
            f"the tokenizer {tokenizer.name} ({choice.tokenizer_type}) belongs to a library whose files transformers "
            "cannot read. Give --tokenizer-name-or-path FOLDER, a Hugging Face form of it with tokenizer.json."
        )
    described = json.loads(description)
    if adds_special_tokens(choice):
        _write_wordpiece(described, tokenizer, target, max_length)
        return
    eod = None
    with contextlib.suppress(ConfigError):  # it may have none
        eod = tokenizer.decode([tokenizer.eod_id])
    if not (target / TOKENIZER_JSON).exists():
        added = described.get("added_tokens") or []
        if eod is not None and not any(entry.get("content") == eod for entry in added):
            described["added_tokens"] = [*added, _special_token(tokenizer.eod_id, eod)]
        write_json(target / TOKENIZER_JSON, described)
    if not (target / TOKENIZER_CONFIG).exists():
        named = {} if eod is None else dict.fromkeys(("bos_token", "eos_token", "unk_token"), eod)
        write_json(
            target / TOKENIZER_CONFIG,
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": max_length,
                "clean_up_tokenization_spaces": False,
                **named,
            },
        )


def write_chat_template(folder: Path, template: ChatTemplate, tokenizer: Tokenizer) -> None:
    """Adds a chat template and its special tokens to the written tokenizer.

    Raises:
        StorageError: a file cannot be written.
    """
    source = template.standalone(tokenizer)
    for name in (CHAT_TEMPLATE, "chat_template.json"):
        (folder / name).unlink(missing_ok=True)
    write_text(folder / CHAT_TEMPLATE, source)
    named = read_json_file(folder / TOKENIZER_CONFIG, "the tokenizer's configuration")
    if named.pop("chat_template", None) is not None:
        _rewrite(folder / TOKENIZER_CONFIG, named)
    described = read_json_file(folder / TOKENIZER_JSON, "the tokenizer")
    added = described.get("added_tokens") or []
    known = {entry.get("content") for entry in added}
    missing = [text for text in tokenizer.special_ids if text in source and text not in known]
    if missing:
        added = [*added, *(_special_token(tokenizer.special_ids[text], text) for text in missing)]
        _rewrite(folder / TOKENIZER_JSON, {**described, "added_tokens": sorted(added, key=lambda entry: entry["id"])})
    _warn_of_other_ids(folder, template, tokenizer)


def _warn_of_other_ids(folder: Path, template: ChatTemplate, tokenizer: Tokenizer) -> None:
    """Logs a warning if transformers encodes a conversation with other ids than the trainer."""
    # The trainer encodes answers separately: ids differ with tokenizers that put a space before every text.
    texts = ("Hello there.", "Hi, what is it?", "What is 2 + 3?\nTell me.", "It is 5.")
    messages = [{"role": role, "content": text} for role, text in zip((USER, ASSISTANT) * 2, texts, strict=True)]
    with loaded_tokenizer(folder) as library:
        text = library.apply_chat_template([dict(message) for message in messages], tokenize=False)
        theirs = [int(number) for number in library(text, add_special_tokens=False)["input_ids"]]
    ours, _ = template.example_ids(messages, tokenizer)
    if ours != theirs:
        index = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(theirs))
        log.warning(
            f"the chat template {template.name} gives a conversation other ids in transformers than in training, from "
            f"token {index} on ({theirs[index : index + 5]} there, {ours[index : index + 5]} here): the tokenizer "
            "encodes a text differently inside another, or the template writes the date. Answers may be worse."
        )


def _rewrite(path: Path, content: Mapping[str, Any]) -> None:
    path.unlink(missing_ok=True)
    write_json(path, dict(content))


def adds_special_tokens(choice: TokenizerChoice) -> bool:
    """True if the written tokenizer surrounds texts with special tokens, unlike --tokenizer-type here."""
    return choice.tokenizer_type in WORDPIECE_TOKENIZERS


def _write_wordpiece(described: dict[str, Any], tokenizer: Tokenizer, target: Path, max_length: int) -> None:
    """Writes BERT's WordPiece tokenizer, which surrounds texts with special tokens; also as `vocab.txt`."""
    vocabulary: dict[str, int] = described["model"]["vocab"]
    lines = "".join(f"{token}\n" for token in sorted(vocabulary, key=vocabulary.__getitem__))
    write_text(target / VOCABULARY, lines)
    special = [token for token in _WORDPIECE_NAMES.values() if token in vocabulary]
    special += [text for text in tokenizer.special_ids if text not in special]
    described["added_tokens"] = [_special_token(vocabulary[text], text) for text in special]
    named = {name: token for name, token in _WORDPIECE_NAMES.items() if token in vocabulary}
    if {"cls_token", "sep_token"} <= named.keys():
        described["post_processor"] = _template(*((named[name], vocabulary[named[name]]) for name in _OUTER_TOKENS))
    write_json(target / TOKENIZER_JSON, described)
    write_json(
        target / TOKENIZER_CONFIG,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            "model_max_length": max_length,
            "do_lower_case": described["normalizer"]["lowercase"],
            "clean_up_tokenization_spaces": False,
            **named,
        },
    )


def _template(first: tuple[str, int], last: tuple[str, int]) -> dict[str, Any]:
    """The post-processor of `[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]`, with B as tokens of type 1."""
    start, end, next_end = (
        {"SpecialToken": {"id": token, "type_id": type_id}}
        for token, type_id in ((first[0], 0), (last[0], 0), (last[0], 1))
    )
    texts = [{"Sequence": {"id": name, "type_id": type_id}} for name, type_id in (("A", 0), ("B", 1))]
    return {
        "type": "TemplateProcessing",
        "single": [start, texts[0], end],
        "pair": [start, texts[0], end, texts[1], next_end],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in (first, last)},
    }


def special_ids(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """The `bos_token_id`, `eos_token_id` and `pad_token_id` of a folder, if set.

    Generation settings override the tokenizer; `eos_token_id` may be a list. A padding token that is also bos or eos is
    dropped: transformers gives its embedding no gradient.
    """
    with loaded_tokenizer(folder) as theirs:
        declared = {name: getattr(theirs, name) for name in SPECIAL_IDS}
    ids = _within_vocabulary(declared, tokenizer)
    if (folder / GENERATION_CONFIG).exists():
        given = read_json_file(folder / GENERATION_CONFIG, "the settings of generation")
        ids |= _within_vocabulary(given, tokenizer)
    if "eos_token_id" not in ids:
        with contextlib.suppress(ConfigError):  # no such token
            ids["eos_token_id"] = tokenizer.eod_id
    if ids.get("pad_token_id") in _numbers(ids.get("bos_token_id")) + _numbers(ids.get("eos_token_id")):
        ids.pop("pad_token_id", None)
    return ids


def keep_special_ids(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Adds the special ids of a model's `config.json` to `generation_config.json`, unless set there.

    Raises:
        StorageError: the file cannot be written.
    """
    path = folder / GENERATION_CONFIG
    given = read_json_file(path, "the settings of generation") if path.exists() else {"_from_model_config": True}
    _rewrite(path, {**_within_vocabulary(config, tokenizer), **given})


def _within_vocabulary(content: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The special ids (numbers or lists) that are within the vocabulary."""
    tokens = range(tokenizer.vocab_size)
    given = {name: content[name] for name in SPECIAL_IDS if content.get(name) not in (None, [])}
    return {name: value for name, value in given.items() if all(number in tokens for number in _numbers(value))}


def _numbers(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def check_padding(family: Family, ids: Mapping[str, Any]) -> None:
    """Checks the padding token of families that count positions from its id.

    Args:
        ids: see `special_ids`.

    Raises:
        ConversionError: it has another id.
    """
    number = ids.get("pad_token_id")
    if family.padding_id is not None and number != family.padding_id:
        raise ConversionError(
            f"a {family.model_type} counts positions from the id of the padding token, which must be "
            f"{family.padding_id}; the tokenizer {'has none' if number is None else f'has {number}'}. Name another "
            "tokenizer with --tokenizer-name-or-path, or export with another --model-type, such as bert."
        )


def added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of added tokens that the tokenizer recognizes in texts; empty for the trainer's own tokenizers."""
    entries = json.loads(tokenizer.description or "{}").get("added_tokens") or []
    return {entry["content"]: entry["id"] for entry in entries}


def check_same_ids(folder: Path, tokenizer: Tokenizer, *, is_bare: bool = False) -> None:
    """Checks that `AutoTokenizer` encodes texts, also with all added tokens of both, like the trainer's tokenizer.

    Args:
        is_bare: compare without surrounding special tokens.

    Raises:
        ConversionError: the ids differ, or it cannot be loaded.
    """
    texts = [*REAL_TEXTS, "".join(REAL_TEXTS)]
    with loaded_tokenizer(folder) as library:
        if added := added_tokens(tokenizer):
            texts += [f"a{token}b {token}" for token in dict.fromkeys([*added, *library.get_added_vocab()])]
        encoded = [list(map(int, ids)) for ids in library(texts, add_special_tokens=not is_bare)["input_ids"]]
    for text, theirs in zip(texts, encoded, strict=True):
        ours = tokenizer.encode(text)
        if ours != theirs:
            raise ConversionError(
                f"the tokenizer in {folder} gives {text[:30]!r}... the ids {theirs[:8]} in transformers and "
                f"{ours[:8]} here, so a text would not mean the same to the model. Name another form of the tokenizer "
                "with --tokenizer-name-or-path, a folder with tokenizer.json."
            )


def _set_class(source: Path, target: Path) -> None:
    """Sets a class in the copied configuration; otherwise transformers takes it from the model's `config.json`."""
    path = source / TOKENIZER_CONFIG
    named = read_json_file(path, "the tokenizer's configuration") if path.exists() else {}
    if "tokenizer_class" not in named:
        _rewrite(target / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **named})


def _special_token(number: int, text: str) -> dict[str, Any]:
    """An added token of a `tokenizer.json`."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": True}


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            real = (source / name).resolve()
            if real.parent != source.resolve() and real.parent.name != "blobs":  # files of the hub's cache
                log.warning(f"{source / name} is a link to {real}, whose content is copied into {target}.")
            try:
                shutil.copyfile(source / name, target / name)
            except OSError as failure:
                size_bytes = (source / name).stat().st_size
                raise cannot_write(DISK, target / name, size_bytes, failure) from failure
