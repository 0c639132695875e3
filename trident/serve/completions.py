"""`/v1/completions`: its request, and the objects of its answer.

Source: OpenAI's API reference, "Completions"; top_k, min_p, typical_p and repetition_penalty are additional fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.inference.sampling.text_stream import settled_text
from trident.serve.answers import AnswerForm
from trident.serve.execution.answer_text import AnswerPiece, TokenRecord
from trident.serve.requests.asks import (
    Ask,
    lengths,
    read_generation,
    refuse_rest,
    token_list,
)
from trident.serve.requests.json_fields import JsonFields, checked_text
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.served import Served

_USUAL_NEW_TOKENS = 16  # OpenAI's default


def read_completion(fields: JsonFields, served: Served, limits: ServerLimits) -> Ask:
    """What the body of a request asks for.

    Raises:
        Refusal: a field is unknown, not supported or wrong.
    """
    prompts, texts = _prompts(fields, served, limits)
    echoes, top_logprobs = fields.flag("echo"), fields.whole("logprobs", None, 0, limits.top_logprobs)
    asked = fields.whole("max_tokens", None, 0 if echoes else 1, 1 << 31)
    new_tokens = lengths(served, prompts, asked, limits)
    if asked is None:
        usual = min(_USUAL_NEW_TOKENS, limits.new_tokens or _USUAL_NEW_TOKENS)
        new_tokens = tuple(min(usual, room) for room in new_tokens)
    ask = Ask(
        prompts=prompts,
        echoes=tuple(texts) if echoes else ("",) * len(prompts),
        new_tokens=new_tokens,
        stop_ids=served.stop_ids,
        top_logprobs=top_logprobs,
        scores_prompts=echoes and (top_logprobs is not None or asked == 0),
        **read_generation(fields, served, limits, len(prompts)),
    )
    refuse_rest(
        fields,
        {
            "best_of": ("all answers are returned; use n", (ask.choices,)),
            "suffix": ("the model continues a text, it fills no gap", ("",)),
        },
    )
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


class CompletionForm(AnswerForm):
    """Writes the answer to a request for completions."""

    whole_kind = chunk_kind = "text_completion"

    def opening_choices(self) -> list[dict[str, Any]]:
        """The prompts, if they are to be repeated."""
        places = range(self.ask.sequences)
        return [self.choice(place, AnswerPiece(self._echo(place))) for place in places if self._echo(place)]

    def choice(self, place: int, piece: AnswerPiece, *, is_whole: bool = False) -> dict[str, Any]:
        echo, logprobs = self._echo(place), None
        if self.ask.top_logprobs is not None:
            logprobs = self._logprobs(piece.tokens, len(echo))
        text = echo + piece.text if is_whole else piece.text
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": piece.finish}

    def _echo(self, place: int) -> str:
        return self.ask.echoes[place // self.ask.choices]

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
