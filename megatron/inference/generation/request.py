"""Requests to the generation engine, and its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.errors import ConfigError
from megatron.inference.sampling import Sampling, TokenChoice

Finish = Literal["stop", "length", "cancelled", "failed"]


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Args:
        id: unique among the engine's requests.
        prompt: token ids; at least one.
        max_new_tokens: most tokens to generate; a text also ends at the model's last position. 0 only scores.
        sample: index of the text; together with the seed it determines all draws.
        stop_ids: tokens that end the text, usually the end-of-document token.
        top_logprobs: number of most probable tokens to report with each token.
        scores_prompt: report the prompt's tokens as well, see `GeneratedToken.prompt`.

    Raises:
        ConfigError: an empty prompt, or a number that is too small.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    sample: int = 0
    stop_ids: frozenset[int] = frozenset()
    top_logprobs: int = 0
    scores_prompt: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ConfigError(f"The prompt of request {self.id} has no tokens. Give at least one.")
        if self.max_new_tokens < (0 if self.scores_prompt else 1):
            raise ConfigError(f"max_new_tokens of request {self.id} is {self.max_new_tokens}. It must be at least 1.")
        if self.top_logprobs < 0:
            raise ConfigError(f"top_logprobs of request {self.id} is {self.top_logprobs}. It must be at least 0.")

    def to_json(self) -> dict[str, Any]:
        """The request as JSON values, for `of_json`."""
        return {**vars(self), "sampling": self.sampling.to_json(), "stop_ids": sorted(self.stop_ids)}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Request:
        """The request from the values of `to_json`."""
        changes = {
            "prompt": tuple(values["prompt"]),
            "sampling": Sampling.of_json(values["sampling"]),
            "stop_ids": frozenset(values["stop_ids"]),
        }
        return cls(**{**values, **changes})


@dataclass(frozen=True)
class GeneratedToken:
    """A new token of a text.

    Log-probabilities come from the network's distribution, in nats, before any adjustment.

    Attributes:
        token: None if the request was cancelled, failed, or was for no new tokens.
        top: the most probable tokens with their log-probabilities, highest first.
        finish: the reason why this token is the last: a stop token ("stop"), the length limit ("length"), cancellation
            ("cancelled"), or a token that could not be chosen ("failed"); None if the text continues.
        failure: the traceback of a failure.
        prompt: the prompt's tokens from the second on, scored as if they had been chosen; with the first token of a
            request with `scores_prompt`.
    """

    request_id: str
    token: int | None
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None
    failure: str | None = None
    prompt: tuple[TokenChoice, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A finished text, without prompt and stop token.

    Attributes:
        logprobs: log-probabilities of the tokens, in nats.
        top: for each token, the requested number of most probable tokens.
    """

    request: Request
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]
    finish: Finish

    @classmethod
    def of(cls, request: Request, generated: list[GeneratedToken]) -> Completion:
        """The completion from all tokens of a request."""
        finish = generated[-1].finish or "length"
        kept = [one for one in (generated if finish == "length" else generated[:-1]) if one.token is not None]
        tokens = tuple(one.token for one in kept if one.token is not None)
        return cls(request, tokens, tuple(one.logprob for one in kept), tuple(one.top for one in kept), finish)
