"""The end of every step, with or without caches: choosing tokens and ending texts."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from megatron.errors import ConfigError, NumericsError
from megatron.inference.forward import decide_on_all
from megatron.inference.generation.request import Finish, Request
from megatron.inference.loaded_model import LoadedModel
from megatron.inference.sampling import Chooser, TokenChoice, choose, score


@dataclass(frozen=True)
class FailedChoice:
    """A token that could not be chosen, with the traceback of the failure."""

    reason: str


def check_request(request: Request, loaded: LoadedModel) -> None:
    """Checks that a network can continue a request.

    Raises:
        ConfigError: the prompt fills all positions, or the prompt or the logit bias has an unknown token.
    """
    length, positions = len(request.prompt), loaded.positions
    if length >= positions + (request.max_new_tokens == 0):
        raise ConfigError(
            f"The prompt of request {request.id} has {length} tokens, and the model has {positions} positions "
            f"(--max-position-embeddings {positions}). Shorten it to at most {positions - 1}."
        )
    if request.scores_prompt and loaded.sees_prompts:
        raise ConfigError(
            f"Request {request.id} is for the log-probabilities of its prompt, but this model attends to a prompt in "
            "both directions, so each token sees itself. Request log-probabilities of new tokens only (without echo)."
        )
    vocabulary = loaded.config.model.vocab_size
    wrong = next((token for token in request.prompt if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ConfigError(
            f"The prompt of request {request.id} has token {wrong}, and the model's ids are 0 to {vocabulary - 1}. "
            f"Encode it with the checkpoint's tokenizer."
        )
    wrong = next((token for token, _ in request.sampling.logit_bias if not 0 <= token < loaded.vocab_size), None)
    if wrong is not None:
        raise ConfigError(
            f"logit_bias of request {request.id} has token {wrong}, and the tokenizer's ids are 0 to "
            f"{loaded.vocab_size - 1}. Remove that token."
        )


def last_length(request: Request, loaded: LoadedModel) -> int:
    """The maximum length of a text in tokens, its prompt included."""
    return min(len(request.prompt) + request.max_new_tokens, loaded.positions)


def finish_of(request: Request, token: int, length: int, last: int) -> Finish | None:
    """The reason why a text ends with its newest token; None if it continues.

    Args:
        length: number of tokens of the text.
        last: `last_length` of the request.
    """
    if token in request.stop_ids:
        return "stop"
    return "length" if length >= last else None


def choose_on_all(
    scores: torch.Tensor | None, choosers: Sequence[Chooser], loaded: LoadedModel
) -> Sequence[TokenChoice]:
    """Chooses on the first rank of the last stage, and gives all ranks of the model copy the same tokens.

    Shapes: scores `[n, v/t]` on the last stage, None on the others.

    Raises:
        NumericsError: the network computed something that is not a number; on all ranks.
        RuntimeError: a token could not be chosen; on all ranks.
    """
    return [one for (one,) in raise_failures(verify_on_all(scores, choosers, [()] * len(choosers), loaded))]


def raise_failures(results: Sequence[Sequence[TokenChoice | FailedChoice]]) -> Sequence[Sequence[TokenChoice]]:
    """Raises RuntimeError if a token could not be chosen; otherwise returns the choices."""
    for one in itertools.chain.from_iterable(results):
        if isinstance(one, FailedChoice):
            raise RuntimeError(f"a token could not be chosen:\n{one.reason}")
    return cast(Sequence[Sequence[TokenChoice]], results)


def verify_on_all(
    scores: torch.Tensor | None, choosers: Sequence[Chooser], drafts: Sequence[Sequence[int]], loaded: LoadedModel
) -> Sequence[Sequence[TokenChoice | FailedChoice]]:
    """Chooses the next token of each text, and further ones as long as the chosen tokens match the draft.

    If a token of one text cannot be chosen, the others are still chosen; identical on all ranks.

    Shapes: scores `[n, v/t]` on the last stage, None on the others, after the last token of a text and each token of
    its draft.

    Args:
        drafts: the drafted tokens of each text.

    Raises:
        NumericsError: the network computed something that is not a number; on all ranks.
    """

    def decide(whole: torch.Tensor) -> list[list[Any]]:
        return [list(map(_message, results)) for results in _verify(whole, choosers, drafts)]

    return [list(map(_of_message, messages)) for messages in decide_on_all(scores, loaded, decide)]


def score_on_all(
    scores: torch.Tensor | None, tokens: Sequence[int], choosers: Sequence[Chooser], loaded: LoadedModel
) -> Sequence[TokenChoice]:
    """Returns the report of `choose_on_all` for given tokens; on all ranks of the model copy.

    Shapes: scores `[n, v/t]` on the last stage, None on the others.

    Raises:
        NumericsError: the network computed something that is not a number; on all ranks.
    """
    messages = decide_on_all(scores, loaded, lambda whole: list(map(_message, score(whole, tokens, choosers))))
    return cast(Sequence[TokenChoice], list(map(_of_message, messages)))  # scoring fails for all or for none


def _verify(
    scores: torch.Tensor, choosers: Sequence[Chooser], drafts: Sequence[Sequence[int]]
) -> list[list[TokenChoice | FailedChoice]]:
    """Shapes: scores `[n, v]`."""
    starts = list(itertools.accumulate((1 + len(draft) for draft in drafts), initial=0))
    results: list[list[TokenChoice | FailedChoice]] = [[] for _ in choosers]
    active, offset = list(range(len(choosers))), 0
    while active:
        rows = scores if len(active) == len(scores) else scores[[starts[text] + offset for text in active]]
        for text, one in zip(active, _choose_each(rows, [choosers[text] for text in active]), strict=True):
            results[text].append(one)
        active = [text for text in active if _is_guessed(results[text][-1], drafts[text][offset : offset + 1])]
        offset += 1
    return results


def _is_guessed(result: TokenChoice | FailedChoice, guess: Sequence[int]) -> bool:
    return isinstance(result, TokenChoice) and result.token in guess


def _choose_each(scores: torch.Tensor, choosers: Sequence[Chooser]) -> Sequence[TokenChoice | FailedChoice]:
    """Chooses for all rows at once; if that fails, for each row separately, so that only the rows at fault fail.

    Shapes: scores `[n, v]`.
    """
    try:
        return choose(scores, choosers)
    except NumericsError:
        raise
    except Exception:
        chosen: list[TokenChoice | FailedChoice] = []
        for row, chooser in enumerate(choosers):
            try:
                chosen += choose(scores[row : row + 1], [chooser])
            except Exception:
                chosen.append(FailedChoice(traceback.format_exc()))
        return chosen


def _message(result: TokenChoice | FailedChoice) -> Any:
    return result.reason if isinstance(result, FailedChoice) else (result.token, result.logprob, result.top)


def _of_message(value: Any) -> TokenChoice | FailedChoice:
    if isinstance(value, str):
        return FailedChoice(value)
    token, logprob, top = value
    return TokenChoice(token, logprob, tuple((other, number) for other, number in top))
