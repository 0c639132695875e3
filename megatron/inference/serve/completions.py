"""`/v1/completions`: its request, and the objects of its answer.

Source: OpenAI's API reference, "Completions"; top_k, min_p, typical_p and repetition_penalty are further fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.inference.sampling.text_stream import settled_text
from megatron.inference.serve.requests.asks import (
    Ask,
    check_model,
    lengths,
    read_choices,
    read_ignored,
    read_sampling,
    read_stop,
    read_streaming,
    token_list,
)
from megatron.inference.serve.requests.fields import JsonFields, checked_text
from megatron.inference.serve.requests.limits import ServerLimits
from megatron.inference.serve.requests.served import Served
from megatron.inference.serve.running.texts import AnswerPiece, TokenRecord

_USUAL_NEW_TOKENS = 16  # OpenAI's default


def read_completion(fields: JsonFields, served: Served, limits: ServerLimits) -> Ask:
    """What the body of a request asks for.

    Raises:
        Refusal: a field is unknown, not supported or wrong.
    """
    check_model(fields, served)
    prompts, texts = _prompts(fields, served, limits)
    echoes, top_logprobs = fields.flag("echo"), fields.whole("logprobs", None, 0, limits.top_logprobs)
    asked = fields.whole("max_tokens", None, 0 if echoes else 1, 1 << 31)
    usual = min(_USUAL_NEW_TOKENS, limits.new_tokens or _USUAL_NEW_TOKENS)
    new_tokens = lengths(served, prompts, asked, limits)
    if asked is None:
        new_tokens = tuple(min(usual, room) for room in new_tokens)
    choices = read_choices(fields, len(prompts), limits)
    streams, with_usage = read_streaming(fields)
    ask = Ask(
        prompts=prompts,
        echoes=tuple(texts) if echoes else ("",) * len(prompts),
        choices=choices,
        new_tokens=new_tokens,
        sampling=read_sampling(fields, served),
        stop_texts=read_stop(fields, limits),
        stop_ids=served.stop_ids,
        top_logprobs=top_logprobs,
        streams=streams,
        with_usage=with_usage,
        scores_prompts=echoes and (top_logprobs is not None or asked == 0),
    )
    fields.unsupported("best_of", "all answers are returned; use n", harmless=(choices,))
    fields.unsupported("suffix", "the model continues a text, it fills no gap", harmless=("",))
    read_ignored(fields)
    fields.finish()
    return ask


def _prompts(fields: JsonFields, served: Served, limits: ServerLimits) -> tuple[tuple[tuple[int, ...], ...], list[str]]:
    """The prompts as tokens and as texts: one text, texts, one list of tokens, or lists of tokens."""
    value = fields.value("prompt")
    if value is None or isinstance(value, str):
        values: list[Any] = [value or ""]
    elif isinstance(value, list) and value and type(value[0]) is int:
        values = [value]
    else:
        values = fields.list_of("prompt", lambda item, place: item, limits.sequences)
        if not values:
            raise fields.refuse("prompt", "is an empty list")
    tokens, texts = [], []
    for number, one in enumerate(values):
        place = "prompt" if len(values) == 1 else f"prompt[{number}]"
        if isinstance(one, str):
            texts.append(checked_text(one, place))
            tokens.append(served.prompt_of_text(one))
        else:
            tokens.append(token_list(one, place, served.vocab_size))
            texts.append(settled_text(served.tokenizer, tokens[-1]))
    return tuple(tokens), texts


@dataclass(frozen=True)
class CompletionForm:
    """Writes the answer to a request for completions.

    Args:
        name: of this answer.
        created_at: seconds since 1970.
    """

    ask: Ask
    served: Served
    name: str
    created_at: int

    def whole(self, pieces: Sequence[AnswerPiece], usage: dict[str, int]) -> dict[str, Any]:
        """The answer as one object; one piece for each choice."""
        choices = [self._choice(place, piece, self._echo(place)) for place, piece in enumerate(pieces)]
        return {**self._head(), "choices": choices, "usage": usage}

    def opening(self) -> list[dict[str, Any]]:
        """What a stream begins with, before any token."""
        return [
            {**self._head(), "choices": [self._choice(place, AnswerPiece(self._echo(place)), "")]}
            for place in range(self.ask.sequences)
            if self._echo(place)
        ]

    def chunk(self, place: int, piece: AnswerPiece) -> dict[str, Any]:
        """A part of one choice."""
        return {**self._head(), "choices": [self._choice(place, piece, "")]}

    def closing(self, usage: dict[str, int]) -> dict[str, Any]:
        """The end of a stream that was asked for its usage."""
        return {**self._head(), "choices": [], "usage": usage}

    def _echo(self, place: int) -> str:
        return self.ask.echoes[place // self.ask.choices]

    def _head(self) -> dict[str, Any]:
        return self.served.head("text_completion", self.name, self.created_at)

    def _choice(self, place: int, piece: AnswerPiece, echo: str) -> dict[str, Any]:
        logprobs = None
        if self.ask.top_logprobs is not None:
            logprobs = self._logprobs(piece.tokens, len(self._echo(place)))
        return {"index": place, "text": echo + piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def _logprobs(self, tokens: Sequence[TokenRecord], echoed: int) -> dict[str, Any]:
        """The tokens with their log-probabilities; the first of a prompt has none.

        Args:
            echoed: characters before the answer.
        """
        text = self.served.token_text
        top = [None if record.logprob is None else self._by_text(record) for record in tokens]
        return {
            "tokens": [text(record.token) for record in tokens],
            "token_logprobs": [record.logprob for record in tokens],
            "top_logprobs": top if self.ask.top_logprobs else None,
            "text_offset": [max(0, record.offset + echoed) for record in tokens],
        }

    def _by_text(self, record: TokenRecord) -> dict[str, float]:
        """The alternatives to a token; of those with the same text, the most probable one."""
        alternatives: dict[str, float] = {}
        for token, logprob in record.top:
            alternatives.setdefault(self.served.token_text(token), logprob)
        return alternatives
