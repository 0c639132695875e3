"""Converts a record with a prompt and an answer, or with a conversation, to messages.

Source: the formats come from Hugging Face's TRL (`prompt` and `completion`, `messages`), OpenAI's fine-tuning files
(`messages`), ShareGPT (`conversations` of `from` and `value`), Alpaca (`instruction`, `input`, `output`), and dsGPT2's
collections (`q`, `a`).
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.errors import printable
from megatron.tokenizers.chat import ASSISTANT, SYSTEM, USER, Message

PROMPT_KEYS = ("prompt", "question", "instruction", "q")
ANSWER_KEYS = ("answer", "completion", "response", "output", "a")
_CONVERSATION_KEYS = ("messages", "conversations")
_ROLE_KEYS = ("role", "from")
_CONTENT_KEYS = ("content", "value")
_ROLES: Mapping[str, str] = types.MappingProxyType(
    {
        "system": SYSTEM,
        "developer": SYSTEM,
        "user": USER,
        "human": USER,
        "assistant": ASSISTANT,
        "gpt": ASSISTANT,
        "chatgpt": ASSISTANT,
        "model": ASSISTANT,
    }
)
_EXPECTED = (
    f"a prompt ({', '.join(PROMPT_KEYS)}) with an answer ({', '.join(ANSWER_KEYS)}), or messages with role and "
    "content, or conversations with from and value"
)


class Example(NamedTuple):
    """A conversation that ends with an answer, and the number of messages cut off after it."""

    messages: tuple[Message, ...]
    cut_messages: int = 0


def example_of(record: Any) -> Example:
    """Returns the messages of a record.

    Raises:
        ValueError: unknown format, or no answer.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"it is {printable(record, 80)}, not an object. It must be {_EXPECTED}")
    conversation = _only(record, _CONVERSATION_KEYS)
    if conversation is not None:
        messages = [*_system(record), *_messages(record[conversation], conversation)]
    else:
        messages = [*_system(record), *_pair(record)]
    last = max((index for index, message in enumerate(messages) if message["role"] == ASSISTANT), default=None)
    if last is None:
        raise ValueError("it has no assistant message. An example must have an answer")
    for message in messages:
        if message["role"] == ASSISTANT and not message["content"].strip():
            raise ValueError("its answer is empty. An answer must have content")
    return Example(tuple(messages[: last + 1]), len(messages) - last - 1)


def with_copied_prompts(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns the messages, each answer replaced by the last user message before it."""
    copied: list[Message] = []
    prompt: str | None = None
    for message in messages:
        if message["role"] == USER:
            prompt = message["content"]
        if message["role"] == ASSISTANT and prompt is not None:
            message = {**message, "content": prompt}
        copied.append(message)
    return tuple(copied)


def _pair(record: Mapping[str, Any]) -> list[Message]:
    prompt_key, answer_key = _only(record, PROMPT_KEYS), _only(record, ANSWER_KEYS)
    if prompt_key is None or answer_key is None:
        raise ValueError(f"it has the keys {printable(sorted(map(str, record)), 120)}. It must have {_EXPECTED}")
    prompt, answer = record[prompt_key], record[answer_key]
    if isinstance(prompt, list) and isinstance(answer, list):
        return [*_messages(prompt, prompt_key), *_messages(answer, answer_key)]
    prompt, answer = _text(prompt, prompt_key), _text(answer, answer_key)
    if prompt_key == "instruction" and record.get("input"):
        prompt = f"{prompt}\n\n{_text(record['input'], 'input')}"
    return [{"role": USER, "content": prompt}, {"role": ASSISTANT, "content": answer}]


def _system(record: Mapping[str, Any]) -> list[Message]:
    system = record.get("system")
    return [{"role": SYSTEM, "content": _text(system, "system")}] if system else []


def _messages(value: Any, key: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} holds {printable(value, 80)}. It must be a list of messages")
    return [_message(message, f"{key}[{index}]") for index, message in enumerate(value)]


def _message(value: Any, path: str) -> Message:
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} is {printable(value, 80)}. A message must be an object with role and content")
    role_key, content_key = _only(value, _ROLE_KEYS), _only(value, _CONTENT_KEYS)
    if role_key is None or content_key is None:
        keys = printable(sorted(map(str, value)), 120)
        raise ValueError(f"{path} has the keys {keys}. A message must have role and content, or from and value")
    role = _ROLES.get(value[role_key]) if isinstance(value[role_key], str) else None
    if role is None:
        known = ", ".join(_ROLES)
        raise ValueError(f"{path}.{role_key} is {printable(value[role_key], 80)}. It must be one of {known}")
    if value.get("weight", 1) != 1:
        raise ValueError(f"{path}.weight is {printable(value['weight'], 80)}. Only weight 1 is supported; remove it")
    return {"role": role, "content": _content(value[content_key], f"{path}.{content_key}")}


def _content(value: Any, path: str) -> str:
    """Returns a string, or the texts of OpenAI's list of parts."""
    parts = value if isinstance(value, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if texts and len(texts) == len(parts):
        return "".join(_text(text, path) for text in texts)
    return _text(value, path)


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{path} holds {printable(value, 80)}. It must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as failure:
        code_point = f"U+{ord(value[failure.start]):04X}"
        raise ValueError(f"{path} holds {code_point}, half of a surrogate pair. It must be valid Unicode") from None
    return value


def _only(record: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """Returns the only one of the keys that a record has, or None."""
    present = [key for key in keys if key in record]
    if len(present) > 1:
        raise ValueError(f"it has both {' and '.join(present)}. It must have one of them")
    return present[0] if present else None
