"""`/v1/completions`: reading the request, writing the answer.

Source: OpenAI's API reference, "Completions"; top_k, min_p, typical_p and repetition_penalty are additional fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.inference.sampling.text_stream import settled_text
from trident.serve.answers import AnswerForm
from trident.serve.execution.answer_text import AnswerDelta, TokenRecord
from trident.serve.requests.json_fields import JsonFields, checked_text
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.parsing import (
    GenerationRequest,
    lengths,
    read_generation,
    refuse_rest,
    token_list,
)
from trident.serve.requests.served_model import ServedModel

_USUAL_NEW_TOKENS = 16  # OpenAI's default


def read_completion(fields: JsonFields, served: ServedModel, limits: ServerLimits) -> GenerationRequest:
    """Reads the body of a request.

    Raises:
        Refusal: a field is unknown, unsupported or invalid.
    """
    prompts, texts = _prompts(fields, served, limits)
    echoes, top_logprobs = fields.flag("echo"), fields.integer("logprobs", None, 0, limits.top_logprobs)
    requested = fields.integer("max_tokens", None, 0 if echoes else 1, 1 << 31)
    new_tokens = lengths(served, prompts, requested, limits)
    if requested is None:
        usual = min(_USUAL_NEW_TOKENS, limits.new_tokens or _USUAL_NEW_TOKENS)
        new_tokens = tuple(min(usual, room) for room in new_tokens)
    request = GenerationRequest(
        prompts=prompts,
        echoes=tuple(texts) if echoes else ("",) * len(prompts),
        new_tokens=new_tokens,
        stop_ids=served.stop_ids,
        top_logprobs=top_logprobs,
        scores_prompts=echoes and (top_logprobs is not None or requested == 0),
        **read_generation(fields, served, limits, len(prompts)),
    )
    refuse_rest(
        fields,
        {
            "best_of": ("all answers are returned; use n", (request.choices,)),
            "suffix": ("the model continues a text and cannot fill a gap", ("",)),
        },
    )
    return request


def _prompts(
    fields: JsonFields, served: ServedModel, limits: ServerLimits
) -> tuple[tuple[tuple[int, ...], ...], list[str]]:
    """The prompts as tokens and as texts; a request gives one or several texts, or one or several lists of tokens."""
    value = fields.value("prompt")
    if value is None or isinstance(value, str):
        values: list[Any] = [value or ""]
    elif isinstance(value, list) and value and type(value[0]) is int:
        values = [value]
    else:
        values = fields.list_of("prompt", lambda item, path: item, limits.sequences)
        if not values:
            raise fields.refuse("prompt", "is an empty list")
    tokens, texts = [], []
    for number, one in enumerate(values):
        path = "prompt" if len(values) == 1 else f"prompt[{number}]"
        if isinstance(one, str):
            texts.append(checked_text(one, path))
            tokens.append(served.prompt_of_text(one))
        else:
            tokens.append(token_list(one, path, served.vocab_size))
            texts.append(settled_text(served.tokenizer, tokens[-1]))
    return tuple(tokens), texts


class CompletionForm(AnswerForm):
    """Writes the answer to a completion request."""

    whole_kind = chunk_kind = "text_completion"

    def opening_choices(self) -> list[dict[str, Any]]:
        """The prompts, if they are echoed."""
        indices = range(self.request.sequences)
        return [self.choice(index, AnswerDelta(self._echo(index))) for index in indices if self._echo(index)]

    def choice(self, index: int, delta: AnswerDelta, *, is_whole: bool = False) -> dict[str, Any]:
        echo, logprobs = self._echo(index), None
        if self.request.top_logprobs is not None:
            logprobs = self._logprobs(delta.tokens, len(echo))
        text = echo + delta.text if is_whole else delta.text
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": delta.finish}

    def _echo(self, index: int) -> str:
        return self.request.echoes[index // self.request.choices]

    def _logprobs(self, tokens: Sequence[TokenRecord], echoed: int) -> dict[str, Any]:
        """The tokens with their log-probabilities; None for the first of a prompt.

        Args:
            echoed: number of characters before the answer.
        """
        text = self.served.token_text
        top = [None if record.logprob is None else self._by_text(record) for record in tokens]
        return {
            "tokens": [text(record.token) for record in tokens],
            "token_logprobs": [record.logprob for record in tokens],
            "top_logprobs": top if self.request.top_logprobs else None,
            "text_offset": [max(0, record.offset + echoed) for record in tokens],
        }

    def _by_text(self, record: TokenRecord) -> dict[str, float]:
        """The alternatives to a token; the most probable one if several have the same text."""
        alternatives: dict[str, float] = {}
        for token, logprob in record.top:
            alternatives.setdefault(self.served.token_text(token), logprob)
        return alternatives
