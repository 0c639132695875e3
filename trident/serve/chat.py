"""`/v1/chat/completions`: its request, and the objects of its answer.

Source: OpenAI's API reference, "Chat"; top_k, min_p, typical_p and repetition_penalty are additional fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.tokenizers.chat import Message
from trident.serve.answers import AnswerForm
from trident.serve.execution.answer_text import AnswerPiece, TokenRecord
from trident.serve.requests.asks import (
    Ask,
    lengths,
    read_generation,
    refuse_rest,
)
from trident.serve.requests.json_fields import JsonFields, checked_text, kind_of, refuse_field
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.served import Served

_MOST_MESSAGES = 4096
_MOST_PARTS = 256
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_ONLY = "messages are plain text here"
_NO_TOOLS = "this server calls no tools"
# Why a field is not supported, and the values that ask for what happens anyway.
_UNSUPPORTED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "tools": (_NO_TOOLS, ([],)),
    "functions": (_NO_TOOLS, ([],)),
    "tool_choice": (_NO_TOOLS, ("none", "auto")),
    "function_call": (_NO_TOOLS, ("none", "auto")),
    "parallel_tool_calls": (_NO_TOOLS, (False, True)),
    "response_format": ("answers are free text", ({"type": "text"},)),
    "modalities": ("answers are text", (["text"],)),
    "audio": ("answers are text", ()),
    "prediction": ("answers are not predicted", ()),
    "reasoning_effort": ("there is no reasoning apart from the answer", ()),
    "verbosity": ("use max_tokens", ()),
    "web_search_options": ("nothing is searched", ()),
}


def read_chat(fields: JsonFields, served: Served, limits: ServerLimits) -> Ask:
    """What the body of a request asks for.

    Raises:
        Refusal: a field is unknown, not supported or wrong.
    """
    messages = fields.list_of("messages", _message, _MOST_MESSAGES)
    if not messages:
        raise fields.refuse("messages", "must be a list of at least one message")
    prompt = served.prompt_of_messages(messages)
    shows = fields.flag("logprobs")
    alternatives = fields.whole("top_logprobs", None, 0, limits.top_logprobs)
    if alternatives is not None and not shows:
        raise fields.refuse("top_logprobs", "is only for requests with logprobs true")
    ask = Ask(
        prompts=(prompt,),
        echoes=("",),
        new_tokens=lengths(served, [prompt], _most_tokens(fields), limits),
        stop_ids=served.chat_stop_ids,
        top_logprobs=(alternatives or 0) if shows else None,
        **read_generation(fields, served, limits, 1, tuple(served.template.stop_texts)),
    )
    refuse_rest(fields, _UNSUPPORTED)
    return ask


def _most_tokens(fields: JsonFields) -> int | None:
    """The older and the newer name of the same field."""
    older = fields.whole("max_tokens", None, 1, 1 << 31)
    newer = fields.whole("max_completion_tokens", None, 1, 1 << 31)
    if older is not None and newer is not None and older != newer:
        raise fields.refuse("max_completion_tokens", f"is {newer}, but 'max_tokens' is {older}; give one of them")
    most: int | None = older if newer is None else newer
    return most


def _message(value: Any, place: str) -> Message:
    """One message of a conversation.

    Raises:
        Refusal: its role or its content is something else than text of the system, the user or the assistant.
    """
    if not isinstance(value, dict):
        raise refuse_field(place, f"must be an object with role and content, not {kind_of(value)}")
    fields = JsonFields(value, place + ".")
    role = fields.text("role")
    if role not in _ROLES:
        raise fields.refuse("role", f"must be system, user or assistant, not {kind_of(role)}")
    content = fields.value("content")
    if isinstance(content, list):
        content = "".join(fields.list_of("content", _part, _MOST_PARTS))
    elif content is None:
        raise fields.refuse("content", "is missing")
    else:
        content = checked_text(content, f"{place}.content")
    for name in ("name", "refusal", "audio", "annotations", "tool_calls", "function_call", "tool_call_id"):
        fields.unsupported(name, _TEXT_ONLY, harmless=([],))
    fields.finish()
    return {"role": _ROLES[role], "content": content}


def _part(value: Any, place: str) -> str:
    if not isinstance(value, dict):
        raise refuse_field(place, f"must be an object with type and text, not {kind_of(value)}")
    fields = JsonFields(value, place + ".")
    kind, text = fields.value("type"), fields.text("text")
    if kind != "text" or text is None:
        raise fields.refuse("type", f"must be text, with a text, not {kind_of(kind)}")
    fields.finish()
    return text


class ChatForm(AnswerForm):
    """Writes the answer to a request for chat."""

    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def opening_choices(self) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        return [self._choice(place, AnswerPiece(""), "delta", role) for place in range(self.ask.sequences)]

    def choice(self, place: int, piece: AnswerPiece, *, is_whole: bool = False) -> dict[str, Any]:
        if is_whole:
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            return self._choice(place, piece, "message", message)
        return self._choice(place, piece, "delta", {"content": piece.text} if piece.text else {})

    def _choice(self, place: int, piece: AnswerPiece, key: str, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self.ask.top_logprobs is not None and (piece.tokens or key == "message"):
            logprobs = {"content": [self._token(record) for record in piece.tokens], "refusal": None}
        return {"index": place, key: content, "logprobs": logprobs, "finish_reason": piece.finish}

    def _token(self, record: TokenRecord) -> dict[str, Any]:
        top = [self._alternative(token, logprob) for token, logprob in record.top]
        return {**self._alternative(record.token, record.logprob), "top_logprobs": top}

    def _alternative(self, token: int, logprob: float | None) -> dict[str, Any]:
        token_bytes = self.served.token_bytes(token)
        shown = None if token_bytes is None else list(token_bytes)
        return {"token": self.served.token_text(token), "logprob": logprob, "bytes": shown}
