"""The tokenizer's files of a model directory: found and copied on the way in, written on the way out."""

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
# What describes a tokenizer; any of the first group is one.
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
# The names of BERT's special tokens in a tokenizer's configuration, and how its vocabularies write them.
_WORDPIECE_NAMES: Mapping[str, str] = types.MappingProxyType(
    {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
)
_AROUND = ("cls_token", "sep_token")
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
            "meaning. Name one with --tokenizer-name-or-path, a folder with tokenizer.json, or import the weights by "
            "themselves with --no-tokenizer."
        )
    _copy(source, target, (*_TOKENIZERS, *_COMPANIONS))
    _name_class(source, target)
    if not (target / TOKENIZER_JSON).exists():
        write_json(target / TOKENIZER_JSON, fast_tokenizer_description(source))
    return TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(target))


def name_special_tokens(source: Path, target: Path) -> None:
    """Has a copied tokenizer name its special tokens, which the files of older models leave to the model's class.

    Raises:
        ConversionError: transformers cannot load the tokenizer.
    """
    path = target / TOKENIZER_CONFIG
    named = read_json_file(path, "the tokenizer's configuration")
    with loaded_tokenizer(source) as theirs:  # whose class may know what its files do not say
        said = {name: str(token) for name, token in theirs.special_tokens_map.items() if isinstance(token, str)}
        inputs = list(theirs.model_input_names)
    _rewrite(path, {"model_input_names": inputs, **said, **named})


def write_tokenizer(choice: TokenizerChoice, tokenizer: Tokenizer, target: Path, max_length: int) -> None:
    """Writes the tokenizer of a checkpoint into a model directory.

    Args:
        max_length: positions of the model, in tokens.

    Raises:
        ConversionError: its library has no form that transformers reads.
        StorageError: a file cannot be written.
    """
    source = Path(choice.tokenizer_name_or_path or "")
    if choice.tokenizer_type in ("PretrainedFromHF", "HFTokenizer") and source.is_dir():
        _copy(source, target, (*_TOKENIZERS, *_COMPANIONS))
    description = tokenizer.description
    if description is None:
        raise ConversionError(
            f"the tokenizer {tokenizer.name} ({choice.tokenizer_type}) is defined by a library that transformers does "
            "not read a file of. Give --tokenizer-name-or-path FOLDER, a Hugging Face form of it with tokenizer.json."
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
    """Gives the written tokenizer a chat template, whose special tokens it then distinguishes from text.

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
    lacking = [text for text in tokenizer.special_ids if text in source and text not in known]
    if lacking:
        added = [*added, *(_special_token(tokenizer.special_ids[text], text) for text in lacking)]
        _rewrite(folder / TOKENIZER_JSON, {**described, "added_tokens": sorted(added, key=lambda entry: entry["id"])})
    _warn_of_other_ids(folder, template, tokenizer)


def _warn_of_other_ids(folder: Path, template: ChatTemplate, tokenizer: Tokenizer) -> None:
    """Says if transformers gives a conversation other ids than the trainer, which encodes answers by themselves.

    That changes ids with tokenizers that put a space before every text.
    """
    said = ("Hello there.", "Hi, what is it?", "What is 2 + 3?\nTell me.", "It is 5.")
    messages = [{"role": role, "content": text} for role, text in zip((USER, ASSISTANT) * 2, said, strict=True)]
    with loaded_tokenizer(folder) as library:
        text = library.apply_chat_template([dict(message) for message in messages], tokenize=False)
        theirs = [int(number) for number in library(text, add_special_tokens=False)["input_ids"]]
    ours, _ = template.example_ids(messages, tokenizer)
    if ours != theirs:
        place = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(theirs))
        log.warning(
            f"the chat template {template.name} gives a conversation other ids in transformers than in training, from "
            f"token {place} on ({theirs[place : place + 5]} there, {ours[place : place + 5]} here): the tokenizer "
            "encodes a text differently in the middle of another, or the template writes the day. Answers may be worse."
        )


def _rewrite(path: Path, content: Mapping[str, Any]) -> None:
    path.unlink(missing_ok=True)
    write_json(path, dict(content))


def adds_special_tokens(choice: TokenizerChoice) -> bool:
    """Whether the written tokenizer puts tokens around texts that ours, chosen by --tokenizer-type, does not."""
    return choice.tokenizer_type in WORDPIECE_TOKENIZERS


def _write_wordpiece(described: dict[str, Any], tokenizer: Tokenizer, target: Path, max_length: int) -> None:
    """Writes BERT's WordPiece with its special tokens, which surround texts there; also as `vocab.txt`."""
    vocabulary: dict[str, int] = described["model"]["vocab"]
    lines = "".join(f"{token}\n" for token in sorted(vocabulary, key=vocabulary.__getitem__))
    write_text(target / VOCABULARY, lines)
    special = [token for token in _WORDPIECE_NAMES.values() if token in vocabulary]
    special += [text for text in tokenizer.special_ids if text not in special]
    described["added_tokens"] = [_special_token(vocabulary[text], text) for text in special]
    named = {name: token for name, token in _WORDPIECE_NAMES.items() if token in vocabulary}
    if {"cls_token", "sep_token"} <= named.keys():
        described["post_processor"] = _around(*((named[name], vocabulary[named[name]]) for name in _AROUND))
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


def _around(first: tuple[str, int], last: tuple[str, int]) -> dict[str, Any]:
    """The post-processor that writes `[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]`, B as tokens of type 1."""
    begin, end, next_end = (
        {"SpecialToken": {"id": token, "type_id": type_id}}
        for token, type_id in ((first[0], 0), (last[0], 0), (last[0], 1))
    )
    texts = [{"Sequence": {"id": name, "type_id": type_id}} for name, type_id in (("A", 0), ("B", 1))]
    return {
        "type": "TemplateProcessing",
        "single": [begin, texts[0], end],
        "pair": [begin, texts[0], end, texts[1], next_end],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in (first, last)},
    }


def special_ids(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id` of a folder, those that it names.

    The settings of generation come before the tokenizer: texts of a model may end with several tokens, a list. A
    padding token that also begins or ends texts is left out: transformers gives its embedding no gradient.
    """
    with loaded_tokenizer(folder) as theirs:
        declared = {name: getattr(theirs, name) for name in SPECIAL_IDS}
    ids = _within_vocabulary(declared, tokenizer)
    if (folder / GENERATION_CONFIG).exists():
        given = read_json_file(folder / GENERATION_CONFIG, "the settings of generation")
        ids |= _within_vocabulary(given, tokenizer)
    if "eos_token_id" not in ids:
        with contextlib.suppress(ConfigError):  # it may have none
            ids["eos_token_id"] = tokenizer.eod_id
    if ids.get("pad_token_id") in _numbers(ids.get("bos_token_id")) + _numbers(ids.get("eos_token_id")):
        ids.pop("pad_token_id", None)
    return ids


def keep_special_ids(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Puts the special ids of a model's `config.json` into `generation_config.json`, where that names none.

    Raises:
        StorageError: these cannot be written.
    """
    path = folder / GENERATION_CONFIG
    given = read_json_file(path, "the settings of generation") if path.exists() else {"_from_model_config": True}
    _rewrite(path, {**_within_vocabulary(config, tokenizer), **given})


def _within_vocabulary(content: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The special ids, each a number or a list, that are all tokens."""
    tokens = range(tokenizer.vocab_size)
    given = {name: content[name] for name in SPECIAL_IDS if content.get(name) not in (None, [])}
    return {name: value for name, value in given.items() if all(number in tokens for number in _numbers(value))}


def _numbers(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def check_padding(family: Family, ids: Mapping[str, Any]) -> None:
    """Checks that the padding token is the one from which a family counts positions, if it does that.

    Args:
        ids: what `special_ids` returned.

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
    """The added tokens that ours finds in texts, with their ids; the trainer's own kinds find none."""
    entries = json.loads(tokenizer.description or "{}").get("added_tokens") or []
    return {entry["content"]: entry["id"] for entry in entries}


def check_same_ids(folder: Path, tokenizer: Tokenizer, *, is_bare: bool = False) -> None:
    """Checks that `AutoTokenizer` gives the ids of our tokenizer, also to texts with each added token of either.

    Args:
        is_bare: without what it adds around a text.

    Raises:
        ConversionError: it gives others, or cannot load it.
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


def _name_class(source: Path, target: Path) -> None:
    """Has the copied configuration name a class, which transformers else takes from the model's `config.json`."""
    path = source / TOKENIZER_CONFIG
    named = read_json_file(path, "the tokenizer's configuration") if path.exists() else {}
    if "tokenizer_class" not in named:
        _rewrite(target / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **named})


def _special_token(number: int, text: str) -> dict[str, Any]:
    """An entry of the added tokens of a `tokenizer.json`."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": True}


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            real = (source / name).resolve()
            if real.parent != source.resolve() and real.parent.name != "blobs":  # where the hub's cache has its files
                log.warning(f"{source / name} is a link to {real}, whose content is copied into {target}.")
            try:
                shutil.copyfile(source / name, target / name)
            except OSError as failure:
                size_bytes = (source / name).stat().st_size
                raise cannot_write(DISK, target / name, size_bytes, failure) from failure
