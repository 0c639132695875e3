"""A request for text, and reading the fields that completion and chat requests have in common."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.errors import ConfigError, printable
from megatron.inference.generation import Request
from megatron.inference.sampling import Sampling
from trident.serve.requests.json_fields import JsonFields, checked_text, refuse_field
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.refusals import Refusal, invalid
from trident.serve.requests.served_model import ServedModel

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "logit_bias", "seed",
)  # fmt: skip
_SEED_BITS = 62
_HIGHEST_TEMPERATURE = 2.0  # OpenAI's
_UNSUPPORTED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "store": ("nothing is stored", (False,)),
    "service_tier": ("there is one tier", ("auto", "default")),
}
# By definition these do not affect the answer.
_WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")


@dataclass(frozen=True)
class GenerationRequest:
    """Texts to generate.

    Args:
        prompts: the tokens of each prompt.
        echoes: for each prompt, the text to put before its answers: the prompt, or nothing.
        choices: number of answers to each prompt.
        new_tokens: for each prompt, the most tokens of an answer.
        stop_texts: end an answer and are not part of it.
        top_logprobs: number of alternatives listed with each token; None for no log-probabilities.
        scores_prompts: list the prompts' tokens with their log-probabilities, too.
        streams: send the answer as it is generated.
        with_usage: end a stream with the numbers of tokens.
    """

    prompts: tuple[tuple[int, ...], ...]
    echoes: tuple[str, ...]
    choices: int
    new_tokens: tuple[int, ...]
    sampling: Sampling
    stop_texts: tuple[str, ...]
    stop_ids: frozenset[int]
    top_logprobs: int | None = None
    streams: bool = False
    with_usage: bool = False
    scores_prompts: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.choices

    def requests(self, name: str) -> list[Request]:
        """The engine's requests: the choices of the first prompt, then of the second, and so on."""
        return [
            Request(
                id=f"{name}/{index}",
                prompt=self.prompts[index // self.choices],
                max_new_tokens=self.new_tokens[index // self.choices],
                sampling=self.sampling,
                sample=index,
                stop_ids=self.stop_ids,
                top_logprobs=self.top_logprobs or 0,
                scores_prompt=self.scores_prompts,
            )
            for index in range(self.sequences)
        ]


def check_model(fields: JsonFields, served: ServedModel) -> None:
    """Checks that a request names the served model, or none.

    Raises:
        Refusal: it names another model.
    """
    name = fields.text("model")
    if name is not None and name != served.name:
        raise Refusal(
            404, f"The model {name[:200]!r} is not served here, only {served.name!r} is.", "model", "model_not_found"
        )


def read_generation(
    fields: JsonFields, served: ServedModel, limits: ServerLimits, prompts: int, stop_texts: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Reads the fields of a `GenerationRequest` that completion and chat requests share.

    Args:
        prompts: number of prompts.
        stop_texts: stop texts in addition to the request's.

    Raises:
        Refusal: a value has the wrong type or is out of bounds.
    """
    choices = read_choices(fields, prompts, limits)
    streams, with_usage = read_streaming(fields)
    return {
        "choices": choices,
        "sampling": read_sampling(fields, served),
        "stop_texts": (*stop_texts, *read_stop(fields, limits)),
        "streams": streams,
        "with_usage": with_usage,
    }


def refuse_rest(fields: JsonFields, unsupported: Mapping[str, tuple[str, tuple[Any, ...]]]) -> None:
    """Refuses unsupported and unread fields.

    Args:
        unsupported: by field, the reason why it is unsupported, and the values that are accepted.
    """
    for name, (reason, harmless) in {**unsupported, **_UNSUPPORTED}.items():
        fields.unsupported(name, reason, harmless=harmless)
    fields.without_effect(*_WITHOUT_EFFECT)
    fields.finish()


def token_list(value: Any, path: str, vocab_size: int) -> tuple[int, ...]:
    """Reads a prompt given as token ids.

    Raises:
        Refusal: not a list of ids of the vocabulary.
    """
    if not isinstance(value, list) or not value:
        raise refuse_field(path, "must be a text, or a list of token ids that is not empty")
    for token in value:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise refuse_field(path, f"holds {printable(token, 60)}, but a token id is from 0 to {vocab_size - 1}")
    return tuple(value)


def lengths(
    served: ServedModel, prompts: Sequence[tuple[int, ...]], requested: int | None, limits: ServerLimits
) -> tuple[int, ...]:
    """The most tokens of an answer to each prompt."""
    return tuple(served.new_tokens(len(prompt), requested, limits.new_tokens) for prompt in prompts)


def read_sampling(fields: JsonFields, served: ServedModel) -> Sampling:
    """Reads the sampling settings; a request without a seed gets a fresh one.

    As with OpenAI, `top_p` 0 means greedy decoding (for `Sampling` it disables the filter).

    Raises:
        Refusal: a value has the wrong type or is out of bounds.
    """
    values = {name: fields.value(name) for name in _SAMPLING}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise fields.refuse(name, "is a number too large to be used")
    fields.number("temperature", None, 0, _HIGHEST_TEMPERATURE)
    if values["seed"] is None:
        values["seed"] = secrets.randbits(_SEED_BITS)
    try:
        sampling = Sampling.of_json(values)
    except ConfigError as failure:
        text = str(failure)
        raise invalid(text, next((name for name in _SAMPLING if text.startswith(name)), None)) from failure
    if values["top_p"] == 0:
        sampling = replace(sampling, greedy=True)
    beyond = max((token for token, _ in sampling.logit_bias), default=-1)
    if beyond >= served.vocab_size:
        raise fields.refuse("logit_bias", f"has token {beyond}, but the last one is {served.vocab_size - 1}")
    return sampling


def read_stop(fields: JsonFields, limits: ServerLimits) -> tuple[str, ...]:
    """The texts that end an answer: one text or a list of them."""
    value = fields.value("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        texts = [checked_text(value, "stop")]
    else:
        texts = fields.list_of("stop", checked_text, limits.stop_texts)
    for text in texts:
        if not 0 < len(text) <= limits.stop_letters:
            raise fields.refuse("stop", f"holds a text of {len(text)} letters, but one has 1 to {limits.stop_letters}")
    return tuple(texts)


def read_streaming(fields: JsonFields) -> tuple[bool, bool]:
    """Reads `streams` and `with_usage` of a `GenerationRequest`."""
    streams = fields.flag("stream")
    options = fields.value("stream_options")
    if options is None:
        return streams, False
    if not isinstance(options, dict):
        raise fields.refuse("stream_options", "must be an object")
    if not streams:
        raise fields.refuse("stream_options", "is only for requests with stream true")
    inner = JsonFields(options, "stream_options.")
    with_usage = inner.flag("include_usage")
    inner.without_effect("include_obfuscation")
    inner.finish()
    return streams, with_usage


def read_choices(fields: JsonFields, prompts: int, limits: ServerLimits) -> int:
    """Reads the number of answers to each prompt."""
    count = int(fields.integer("n", 1, 1, limits.sequences))
    if count * prompts > limits.sequences:
        raise fields.refuse(
            "n", f"is {count} for each of {prompts} prompts, but one request may have {limits.sequences} answers"
        )
    return count
