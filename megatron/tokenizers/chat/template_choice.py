"""Loads a chat template: by name, from a file, or from the tokenizer's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, printable
from megatron.files.settings import read_json, read_text
from megatron.tokenizers.chat.named import NEEDED_TOKENS, PLAIN, SOURCES
from megatron.tokenizers.chat.sandbox import MOST_TEMPLATE_BYTES
from megatron.tokenizers.chat.template import ChatTemplate
from megatron.tokenizers.tokenizer import TokenizerFlags

_TEMPLATE_FILE = "chat_template.jinja"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATE_JSON = "chat_template.json"
_SPECIAL_TOKENS_MAP = "special_tokens_map.json"
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MOST_CONFIG_BYTES = 32 << 20  # some list all added tokens


def load_chat_template(name_or_path: str | None, tokenizer_folder: Path | None) -> ChatTemplate:
    """Loads a chat template.

    Args:
        name_or_path: plain, chatml, llama, dsgpt2, a file with a Jinja template, or a tokenizer_config.json; None for
            the tokenizer's template, or plain if it has none.
        tokenizer_folder: folder of the tokenizer's files, if any.

    Raises:
        ConfigError: unknown name, missing file, or invalid template.
    """
    tokens = {} if tokenizer_folder is None else _token_texts(tokenizer_folder)
    if name_or_path is not None and name_or_path in SOURCES:
        return _named(name_or_path)
    if name_or_path is not None:
        path = Path(name_or_path)
        if not path.is_file():
            raise ConfigError(
                f"--chat-template {name_or_path} is neither {', '.join(SOURCES)} nor a file. Use one of the names, or "
                "the path of a Jinja template or of a tokenizer_config.json."
            )
        source = _template_of_json(path) if path.suffix == ".json" else _template_text(path)
        if source is None:
            raise ConfigError(f"--chat-template {name_or_path} contains no chat_template. Use a file that does.")
        return ChatTemplate(name_or_path, source, tokens or _token_texts(path.parent))
    folders = [] if tokenizer_folder is None else [tokenizer_folder]
    for path in (folder / file for folder in folders for file in (_TEMPLATE_FILE, _TOKENIZER_CONFIG, _TEMPLATE_JSON)):
        if path.is_file():
            source = _template_text(path) if path.name == _TEMPLATE_FILE else _template_of_json(path)
            if source is not None:
                return ChatTemplate(str(path), source, tokens)
    return _named(PLAIN)


def tokenizer_folder(flags: TokenizerFlags) -> Path | None:
    """Returns the folder of the tokenizer, which may hold a chat template; None for a Hub name."""
    for value in (flags.tokenizer_name_or_path, flags.vocab_file):
        if value and Path(value).exists():
            return Path(value) if Path(value).is_dir() else Path(value).parent
    return None


def _named(name: str) -> ChatTemplate:
    return ChatTemplate(name, SOURCES[name], needed_tokens=NEEDED_TOKENS[name])


def _template_text(path: Path) -> str:
    return read_text(str(path), f"the chat template {path}", MOST_TEMPLATE_BYTES)


def _template_of_json(path: Path) -> str | None:
    """Returns the template in a tokenizer's JSON file; if it has several, the default one."""
    content = _json_of(path)
    template = content.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
        if template is None:
            raise ConfigError(
                f"{path} has the chat templates {printable(sorted(map(str, by_name)))}, but none named default. Write "
                "the one you want to a file and use that with --chat-template."
            )
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{path}: chat_template holds {printable(template)}; it must be a string.")
    return template


def _token_texts(folder: Path) -> dict[str, str]:
    """Returns the special tokens declared in a tokenizer's files."""
    texts: dict[str, str] = {}
    for file in (_SPECIAL_TOKENS_MAP, _TOKENIZER_CONFIG):
        path = folder / file
        content = _json_of(path) if path.is_file() else {}
        for name in _TOKEN_NAMES:
            token = content.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                texts[name] = token
    return texts


def _json_of(path: Path) -> dict[str, Any]:
    content = read_json(str(path), str(path), _MOST_CONFIG_BYTES)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {printable(content)}; it must hold one JSON object. Download the file again.")
    return content
