"""A record of prompt and answer, or of a conversation, as messages.

Source: the forms come from Hugging Face's TRL (`prompt` and `completion`, `messages`), OpenAI's fine-tuning files
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
_WANTED = (
    f"a prompt ({', '.join(PROMPT_KEYS)}) with an answer ({', '.join(ANSWER_KEYS)}), or messages with role and "
    "content, or conversations with from and value"
)


class Example(NamedTuple):
    """A conversation that ends with an answer, and how many messages after that answer were cut off."""

    messages: tuple[Message, ...]
    cut_messages: int = 0


def example_of(record: Any) -> Example:
    """The messages of a record.

    Raises:
        ValueError: it has none of the forms, or holds no answer; the text says what is wrong and what is required.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"it is {printable(record, 80)}, not an object. It must be {_WANTED}")
    conversation = _only(record, _CONVERSATION_KEYS)
    if conversation is not None:
        messages = [*_system(record), *_messages(record[conversation], conversation)]
    else:
        messages = [*_system(record), *_pair(record)]
    last = max((place for place, message in enumerate(messages) if message["role"] == ASSISTANT), default=None)
    if last is None:
        raise ValueError("it has no message of the assistant. An example must have an answer")
    for message in messages:
        if message["role"] == ASSISTANT and not message["content"].strip():
            raise ValueError("its answer is empty. An answer must hold something to learn")
    return Example(tuple(messages[: last + 1]), len(messages) - last - 1)


def with_copied_prompts(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with the text of each answer replaced by the text of the last user message before it."""
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
        raise ValueError(f"it has the keys {printable(sorted(map(str, record)), 120)}. It must have {_WANTED}")
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
    return [_message(one, f"{key}[{number}]") for number, one in enumerate(value)]


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, Mapping):
        raise ValueError(f"{place} is {printable(value, 80)}. A message must be an object with role and content")
    role_key, content_key = _only(value, _ROLE_KEYS), _only(value, _CONTENT_KEYS)
    if role_key is None or content_key is None:
        keys = printable(sorted(map(str, value)), 120)
        raise ValueError(f"{place} has the keys {keys}. A message must have role and content, or from and value")
    role = _ROLES.get(value[role_key]) if isinstance(value[role_key], str) else None
    if role is None:
        known = ", ".join(_ROLES)
        raise ValueError(f"{place}.{role_key} is {printable(value[role_key], 80)}. It must be one of {known}")
    if value.get("weight", 1) != 1:
        raise ValueError(f"{place}.weight is {printable(value['weight'], 80)}. All answers count; leave weight out")
    return {"role": role, "content": _content(value[content_key], f"{place}.{content_key}")}


def _content(value: Any, place: str) -> str:
    """A text, or the texts in OpenAI's list of parts."""
    parts = value if isinstance(value, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if texts and len(texts) == len(parts):
        return "".join(_text(text, place) for text in texts)
    return _text(value, place)


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place} holds {printable(value, 80)}. It must be a text")
    try:
        value.encode()
    except UnicodeEncodeError as failure:
        letter = f"U+{ord(value[failure.start]):04X}"
        raise ValueError(f"{place} holds {letter}, half of a surrogate pair. It must be text") from None
    return value


def _only(record: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """The first of the keys that a record has; None if it has none."""
    present = [key for key in keys if key in record]
    if len(present) > 1:
        raise ValueError(f"it has both {' and '.join(present)}. It must have one of them")
    return present[0] if present else None
