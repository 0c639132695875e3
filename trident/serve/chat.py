"""`/v1/chat/completions`: reading the request, writing the answer.

Source: OpenAI's API reference, "Chat"; top_k, min_p, typical_p and repetition_penalty are additional fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.tokenizers.chat import Message
from trident.serve.answers import AnswerForm
from trident.serve.execution.answer_text import AnswerDelta, TokenRecord
from trident.serve.requests.json_fields import JsonFields, checked_text, kind_of, refuse_field
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.parsing import (
    GenerationRequest,
    lengths,
    read_generation,
    refuse_rest,
)
from trident.serve.requests.served_model import ServedModel

_MAX_MESSAGES = 4096
_MAX_PARTS = 256
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_ONLY = "messages are plain text here"
_NO_TOOLS = "this server calls no tools"
# The reason why a field is not supported, and the values that are accepted because they change nothing.
_UNSUPPORTED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "tools": (_NO_TOOLS, ([],)),
    "functions": (_NO_TOOLS, ([],)),
    "tool_choice": (_NO_TOOLS, ("none", "auto")),
    "function_call": (_NO_TOOLS, ("none", "auto")),
    "parallel_tool_calls": (_NO_TOOLS, (False, True)),
    "response_format": ("answers are free text", ({"type": "text"},)),
    "modalities": ("answers are text", (["text"],)),
    "audio": ("answers are text", ()),
    "prediction": ("predicted outputs are not used", ()),
    "reasoning_effort": ("the model has no separate reasoning", ()),
    "verbosity": ("use max_tokens", ()),
    "web_search_options": ("this server does not search the web", ()),
}


def read_chat(fields: JsonFields, served: ServedModel, limits: ServerLimits) -> GenerationRequest:
    """Reads the body of a request.

    Raises:
        Refusal: a field is unknown, unsupported or invalid.
    """
    messages = fields.list_of("messages", _message, _MAX_MESSAGES)
    if not messages:
        raise fields.refuse("messages", "must be a list of at least one message")
    prompt = served.prompt_of_messages(messages)
    shows = fields.flag("logprobs")
    alternatives = fields.integer("top_logprobs", None, 0, limits.top_logprobs)
    if alternatives is not None and not shows:
        raise fields.refuse("top_logprobs", "is only for requests with logprobs true")
    request = GenerationRequest(
        prompts=(prompt,),
        echoes=("",),
        new_tokens=lengths(served, [prompt], _most_tokens(fields), limits),
        stop_ids=served.chat_stop_ids,
        top_logprobs=(alternatives or 0) if shows else None,
        **read_generation(fields, served, limits, 1, tuple(served.template.stop_texts)),
    )
    refuse_rest(fields, _UNSUPPORTED)
    return request


def _most_tokens(fields: JsonFields) -> int | None:
    """The limit on new tokens, under its older or newer name."""
    older = fields.integer("max_tokens", None, 1, 1 << 31)
    newer = fields.integer("max_completion_tokens", None, 1, 1 << 31)
    if older is not None and newer is not None and older != newer:
        raise fields.refuse("max_completion_tokens", f"is {newer}, but 'max_tokens' is {older}; give one of them")
    limit: int | None = older if newer is None else newer
    return limit


def _message(value: Any, path: str) -> Message:
    """Reads one message of a conversation.

    Raises:
        Refusal: an unknown role, or content that is not text.
    """
    if not isinstance(value, dict):
        raise refuse_field(path, f"must be an object with role and content, not {kind_of(value)}")
    fields = JsonFields(value, path + ".")
    role = fields.text("role")
    if role not in _ROLES:
        raise fields.refuse("role", f"must be system, user or assistant, not {kind_of(role)}")
    content = fields.value("content")
    if isinstance(content, list):
        content = "".join(fields.list_of("content", _part, _MAX_PARTS))
    elif content is None:
        raise fields.refuse("content", "is missing")
    else:
        content = checked_text(content, f"{path}.content")
    for name in ("name", "refusal", "audio", "annotations", "tool_calls", "function_call", "tool_call_id"):
        fields.unsupported(name, _TEXT_ONLY, harmless=([],))
    fields.finish()
    return {"role": _ROLES[role], "content": content}


def _part(value: Any, path: str) -> str:
    if not isinstance(value, dict):
        raise refuse_field(path, f"must be an object with type and text, not {kind_of(value)}")
    fields = JsonFields(value, path + ".")
    kind, text = fields.value("type"), fields.text("text")
    if kind != "text" or text is None:
        raise fields.refuse("type", f"must be text, with a text, not {kind_of(kind)}")
    fields.finish()
    return text


class ChatForm(AnswerForm):
    """Writes the answer to a chat request."""

    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def opening_choices(self) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        return [self._choice(index, AnswerDelta(""), "delta", role) for index in range(self.request.sequences)]

    def choice(self, index: int, delta: AnswerDelta, *, is_whole: bool = False) -> dict[str, Any]:
        if is_whole:
            message = {"role": "assistant", "content": delta.text, "refusal": None}
            return self._choice(index, delta, "message", message)
        return self._choice(index, delta, "delta", {"content": delta.text} if delta.text else {})

    def _choice(self, index: int, delta: AnswerDelta, key: str, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self.request.top_logprobs is not None and (delta.tokens or key == "message"):
            logprobs = {"content": [self._token(record) for record in delta.tokens], "refusal": None}
        return {"index": index, key: content, "logprobs": logprobs, "finish_reason": delta.finish}

    def _token(self, record: TokenRecord) -> dict[str, Any]:
        top = [self._alternative(token, logprob) for token, logprob in record.top]
        return {**self._alternative(record.token, record.logprob), "top_logprobs": top}

    def _alternative(self, token: int, logprob: float | None) -> dict[str, Any]:
        token_bytes = self.served.token_bytes(token)
        shown = None if token_bytes is None else list(token_bytes)
        return {"token": self.served.token_text(token), "logprob": logprob, "bytes": shown}
