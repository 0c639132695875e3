"""Requests to the engine, and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.errors import ConfigError
from megatron.inference.sampling import Chosen, Sampling

Finish = Literal["stop", "length", "cancelled", "failed"]


@dataclass(frozen=True)
class Request:
    """A prompt to be continued.

    Args:
        id: unique among the requests that the engine holds.
        prompt: token ids; at least one.
        max_new_tokens: the most tokens generated; a text also ends where the model's positions do. 0 only scores.
        sample: index of the text; together with the seed it determines all draws.
        stop_ids: tokens that end the text, usually the end-of-document token.
        top_logprobs: how many of the most probable tokens are reported with each token.
        scores_prompt: whether the tokens of the prompt are reported as well, see `GeneratedToken.prompt`.

    Raises:
        ConfigError: there is no prompt, or a number is too small.
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
            raise ConfigError(f"Request {self.id} asks for {self.max_new_tokens} new tokens. Ask for at least 1.")
        if self.top_logprobs < 0:
            raise ConfigError(f"Request {self.id} asks for {self.top_logprobs} top log-probabilities. Use 0 or more.")

    def to_json(self) -> dict[str, Any]:
        """An object from which `of_json` makes the same request."""
        return {**vars(self), "sampling": self.sampling.to_json(), "stop_ids": sorted(self.stop_ids)}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Request:
        """The request that `to_json` described."""
        changes = {
            "prompt": tuple(values["prompt"]),
            "sampling": Sampling.of_json(values["sampling"]),
            "stop_ids": frozenset(values["stop_ids"]),
        }
        return cls(**{**values, **changes})


@dataclass(frozen=True)
class GeneratedToken:
    """One more token of a text.

    Log-probabilities come from the network's distribution, in nats, before any adjustment.

    Attributes:
        token: None where the request was cancelled or failed, or asked for no new token.
        top: the most probable tokens with their log-probabilities, highest first.
        finish: why this token is the last: it is a stop token ("stop"), the text is as long as it may be ("length"), or
            the request was cancelled, or its token could not be chosen ("failed"); None if the text continues.
        failure: the traceback where it failed.
        prompt: the tokens of the prompt from the second on, as if they had been chosen; with the first answer to a
            request that asks for them.
    """

    request_id: str
    token: int | None
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None
    failure: str | None = None
    prompt: tuple[Chosen, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A finished text, the prompt and the stop token not included.

    Attributes:
        logprobs: of the tokens, in nats.
        top: for every token the requested number of most probable ones.
    """

    request: Request
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]
    finish: Finish

    @classmethod
    def of(cls, request: Request, generated: list[GeneratedToken]) -> Completion:
        """The completion made of all tokens of a request."""
        finish = generated[-1].finish or "length"
        kept = [one for one in (generated if finish == "length" else generated[:-1]) if one.token is not None]
        tokens = tuple(one.token for one in kept if one.token is not None)
        return cls(request, tokens, tuple(one.logprob for one in kept), tuple(one.top for one in kept), finish)
