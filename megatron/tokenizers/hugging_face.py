"""Tokenizers described by a `tokenizer.json`: from a file, a folder or the Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron import log
from megatron.errors import ConfigError, DataError
from megatron.tokenizers.declared import (
    ADDED,
    CONFIG,
    SPECIAL_MAP,
    add_declared,
    numbered_tokens,
    prefix_space_changes,
    read_declarations,
    special_tokens,
)
from megatron.tokenizers.encoders.fast_encoder import catch_rust_panics
from megatron.tokenizers.library import ROLES, Tokenizer, TokenizerProperties, rust_tokenizer, special_added_tokens
from megatron.tokenizers.tokenizer_files import canonical, read_tokenizer_json, require_tokenizers

_END_OF_DOCUMENT_GUESSES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "[SEP]")
TOKENIZER_FOLDER = "tokenizer"  # of an imported model's tokenizer, next to its checkpoints
_HF_FILES = ("tokenizer.json", CONFIG, SPECIAL_MAP, ADDED)


def hugging_face_tokenizer(kind: str, source: str | None, known_library: str | None) -> Tokenizer:
    """Loads a tokenizer from a folder with `tokenizer.json`, from that file, or by its Hub name.

    Raises:
        ConfigError: the source is missing.
        DataError: its files are damaged.
    """
    if not source:
        raise ConfigError(
            f"--tokenizer-type {kind} requires --tokenizer-name-or-path (a folder with tokenizer.json, that file, or a "
            "Hub name)."
        )
    files = _hugging_face_files(source)
    settings = read_declarations(files)
    if "tokenizer.json" in files:
        description = read_tokenizer_json(files["tokenizer.json"], "tokenizer.json")
        where = str(files["tokenizer.json"])
    else:
        description = _converted_by_transformers(source)
        where = source
    description = _without_dropout(description, where)
    reference = _reference_from_json(description, where)
    if prefix_space_changes(description, settings):
        reference = _reference_from_json(description, where)
    built_in = repr(reference.get_added_tokens_decoder())
    add_declared(reference, numbered_tokens(settings), where)
    named_in = " or ".join(str(files[name]) for name in (CONFIG, SPECIAL_MAP) if name in files)
    named = {role: _named_token(f"{role}_token", reference, settings, named_in) for role in ("eos", *ROLES)}
    add_declared(reference, special_tokens(settings), where, special=True)
    reference.encode_special_tokens = bool(settings.get("split_special_tokens"))
    if (declared := repr(reference.get_added_tokens_decoder())) != built_in or reference.encode_special_tokens:
        description = {**description, "added_tokens": declared, "split": reference.encode_special_tokens}
    eod_id = named.pop("eos")
    facts = TokenizerProperties(
        f"{kind}:{source}",
        eod_id=_well_known_eod(reference) if eod_id is None else eod_id,
        vocab_size=1 + max(reference.get_vocab(with_added_tokens=True).values()),
        identity=lambda: canonical(description),
        special_ids=lambda: special_added_tokens(reference),
        is_exact=_is_exact(description),
        unknown_id=_unknown_id(reference, description),
        roles={role: number for role, number in named.items() if number is not None},
    )
    return rust_tokenizer(facts, reference, known_library)


def _hugging_face_files(source: str) -> dict[str, Path]:
    """Returns the paths of existing tokenizer files by name: from a folder, next to a tokenizer.json, or the Hub."""
    files = local_files(source)
    return _hub_files(source) if files is None else files


def local_files(source: str) -> dict[str, Path] | None:
    """Returns the paths of local tokenizer files by name; None if only the Hub can have them.

    Raises:
        ConfigError: no local files, and the source is not a Hub name.
    """
    path = Path(source)
    if path.is_file():
        others = {name: path.parent / name for name in _HF_FILES[1:] if (path.parent / name).exists()}
        return {"tokenizer.json": path, **others}
    if path.is_dir():
        return {name: path / name for name in _HF_FILES if (path / name).exists()}
    if path.name == TOKENIZER_FOLDER and (path.parent / "model.yaml").is_file():
        raise ConfigError(
            f"--tokenizer-name-or-path {source} does not exist: the weights in {path.parent} were imported without a "
            "tokenizer (--no-tokenizer), which text and training require. Copy their tokenizer's files to that "
            "folder, or use another tokenizer."
        )
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or source.endswith((".json", ".model")):
        raise ConfigError(f"--tokenizer-name-or-path {source} is neither a local file or folder nor a Hub name.")
    return None


def _hub_files(source: str) -> dict[str, Path]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    files = {}
    for name in _HF_FILES:
        try:
            files[name] = Path(hf_hub_download(source, name))
        except EntryNotFoundError:
            continue
        except Exception as failure:
            raise ConfigError(
                f"--tokenizer-name-or-path {source}: not a local folder, and the Hub returned no {name} "
                f"({type(failure).__name__}: {str(failure).splitlines()[0][:200]}). Check the name and the network, or "
                "use a local folder."
            ) from failure
    return files


def _converted_by_transformers(source: str) -> Any:
    """Converts a tokenizer without tokenizer.json by `transformers`, if installed."""
    try:
        from transformers import AutoTokenizer
    except ImportError as failure:
        raise ConfigError(
            f"--tokenizer-name-or-path {source} has no tokenizer.json, and transformers, which could convert its "
            "files, is not installed. Install it (pip install transformers), or save the tokenizer as tokenizer.json."
        ) from failure
    try:
        loaded = AutoTokenizer.from_pretrained(source)
        return json.loads(loaded.backend_tokenizer.to_str())
    except Exception as failure:
        raise ConfigError(
            f"--tokenizer-name-or-path {source} has no tokenizer.json and transformers could not convert its files "
            f"({type(failure).__name__}: {str(failure)[:300]}). Save the tokenizer as tokenizer.json."
        ) from failure


def _without_dropout(description: Any, where: str) -> Any:
    model = description.get("model") if isinstance(description, dict) else None
    if not isinstance(model, dict) or not model.get("dropout"):
        return description
    log.info(f"{where}: BPE-dropout of {model['dropout']} is disabled, so that a text always has the same ids")
    return {**description, "model": {**model, "dropout": None}}


def _reference_from_json(description: Any, path: str) -> Any:
    require_tokenizers()
    from tokenizers import Tokenizer as Reference

    if isinstance(description, dict):
        # A corpus needs complete texts without padding.
        description = {**description, "truncation": None, "padding": None}
    try:
        reference = catch_rust_panics(lambda: Reference.from_str(json.dumps(description)))
    except ValueError as failure:
        raise DataError(f"{path} is not a tokenizer that the tokenizers library can load: {failure}.") from failure
    if not reference.get_vocab_size():
        raise DataError(f"{path} holds a tokenizer without tokens. Download or write the file again.")
    return reference


def _well_known_eod(reference: Any) -> int | None:
    """Returns a well-known end-of-document token, for a tokenizer that declares none."""
    ids = (_id_of(reference, token) for token in _END_OF_DOCUMENT_GUESSES)
    return next((number for number in ids if number is not None), None)


def _named_token(what: str, reference: Any, settings: Mapping[str, Any], named_in: str) -> int | None:
    """Returns the id of a token declared in the settings, such as `eos_token`; None if it is not declared.

    Raises:
        DataError: the token is not in the vocabulary.
    """
    token = settings.get(what)
    token = token.get("content") if isinstance(token, dict) else token
    number = _id_of(reference, token) if isinstance(token, str) else None
    if isinstance(token, str) and number is None:
        raise DataError(f"{named_in} names {what} {token!r:.200}, which is not in the vocabulary of tokenizer.json.")
    return number


def _is_exact(description: Mapping[str, Any]) -> bool:
    """Returns True if decoding restores texts byte for byte: byte-level, without normalization."""
    cutter, decoder = (description.get(name) or {} for name in ("pre_tokenizer", "decoder"))
    cuts = [stage for stage in (cutter, *(cutter.get("pretokenizers") or ())) if stage.get("type") == "ByteLevel"]
    return (
        description.get("normalizer") is None
        and bool(cuts)
        and not any(stage.get("add_prefix_space") for stage in cuts)
        and decoder.get("type") == "ByteLevel"
    )


def _unknown_id(reference: Any, description: Mapping[str, Any]) -> int | None:
    """Returns the id for text outside the vocabulary; a Unigram model declares the id, others the token."""
    model = description.get("model")
    model = model if isinstance(model, dict) else {}
    if isinstance(model.get("unk_id"), int):
        return int(model["unk_id"])
    token = model.get("unk_token")
    return _id_of(reference, token) if isinstance(token, str) else None


def _id_of(reference: Any, token: str) -> int | None:
    try:
        number = reference.token_to_id(token)
    except UnicodeEncodeError:  # lone surrogates
        return None
    return None if number is None else int(number)
