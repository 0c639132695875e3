"""What happens at the end of every step, with or without caches: tokens are chosen, and some texts end."""

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
from megatron.inference.sampling import Chooser, Chosen, choose, score


@dataclass(frozen=True)
class Failed:
    """Replaces a token that could not be chosen: the traceback of the failure."""

    reason: str


def check_request(request: Request, loaded: LoadedModel) -> None:
    """Checks that a network can continue a request.

    Raises:
        ConfigError: the prompt fills all positions, or it or the logit bias has a token that does not exist.
    """
    length, positions = len(request.prompt), loaded.positions
    if length >= positions + (request.max_new_tokens == 0):
        raise ConfigError(
            f"The prompt of request {request.id} has {length} tokens, and the model has {positions} positions "
            f"(--max-position-embeddings {positions}). Shorten it to at most {positions - 1}."
        )
    if request.scores_prompt and loaded.sees_prompts:
        raise ConfigError(
            f"Request {request.id} asks for the log-probabilities of its prompt, and this model attends to a prompt in "
            "both directions, so each token sees itself. Ask for log-probabilities of new tokens only (without echo)."
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
    """Tokens at which a text ends, its prompt included."""
    return min(len(request.prompt) + request.max_new_tokens, loaded.positions)


def finish_of(request: Request, token: int, length: int, last: int) -> Finish | None:
    """Why a text ends with its newest token; None if it continues.

    Args:
        length: tokens of the text.
        last: `last_length` of the request.
    """
    if token in request.stop_ids:
        return "stop"
    return "length" if length >= last else None


def choose_on_all(scores: torch.Tensor | None, choosers: Sequence[Chooser], loaded: LoadedModel) -> Sequence[Chosen]:
    """Chooses on the first rank of the last stage, and gives all ranks of the model copy the same tokens.

    Shapes: scores `[n, v/t]` on the last stage, None on the others.

    Raises:
        NumericsError: the network computed something that is not a number; on all ranks.
        RuntimeError: a token could not be chosen; on all ranks.
    """
    return [one for (one,) in raise_failures(verify_on_all(scores, choosers, [()] * len(choosers), loaded))]


def raise_failures(results: Sequence[Sequence[Chosen | Failed]]) -> Sequence[Sequence[Chosen]]:
    """What was chosen.

    Raises:
        RuntimeError: a token could not be chosen.
    """
    for one in itertools.chain.from_iterable(results):
        if isinstance(one, Failed):
            raise RuntimeError(f"a token could not be chosen:\n{one.reason}")
    return cast(Sequence[Sequence[Chosen]], results)


def verify_on_all(
    scores: torch.Tensor | None, choosers: Sequence[Chooser], drafts: Sequence[Sequence[int]], loaded: LoadedModel
) -> Sequence[Sequence[Chosen | Failed]]:
    """Chooses the next token of each text, and the one after it for as long as the chosen one had been guessed.

    If a token of one text cannot be chosen, the others still get theirs; identical on all ranks.

    Shapes: scores `[n, v/t]` on the last stage, None on the others, after the last token of a text and each of its
    guesses.

    Args:
        drafts: the guesses for each text.

    Raises:
        NumericsError: the network computed something that is not a number; on all ranks.
    """

    def decide(whole: torch.Tensor) -> list[list[Any]]:
        return [list(map(_message, results)) for results in _verify(whole, choosers, drafts)]

    return [list(map(_of_message, messages)) for messages in decide_on_all(scores, loaded, decide)]


def score_on_all(
    scores: torch.Tensor | None, tokens: Sequence[int], choosers: Sequence[Chooser], loaded: LoadedModel
) -> Sequence[Chosen]:
    """What `choose_on_all` would report of given tokens; on all ranks of the model copy alike.

    Shapes: scores `[n, v/t]` on the last stage, None on the others.

    Raises:
        NumericsError: the network computed something that is not a number; on all ranks.
    """
    messages = decide_on_all(scores, loaded, lambda whole: list(map(_message, score(whole, tokens, choosers))))
    return cast(Sequence[Chosen], list(map(_of_message, messages)))  # these fail together or not at all


def _verify(
    scores: torch.Tensor, choosers: Sequence[Chooser], drafts: Sequence[Sequence[int]]
) -> list[list[Chosen | Failed]]:
    """Shapes: scores `[n, v]`."""
    begins = list(itertools.accumulate((1 + len(draft) for draft in drafts), initial=0))
    results: list[list[Chosen | Failed]] = [[] for _ in choosers]
    going, place = list(range(len(choosers))), 0
    while going:
        rows = scores if len(going) == len(scores) else scores[[begins[text] + place for text in going]]
        for text, one in zip(going, _choose_each(rows, [choosers[text] for text in going]), strict=True):
            results[text].append(one)
        going = [text for text in going if _is_guessed(results[text][-1], drafts[text][place : place + 1])]
        place += 1
    return results


def _is_guessed(result: Chosen | Failed, guess: Sequence[int]) -> bool:
    return isinstance(result, Chosen) and result.token in guess


def _choose_each(scores: torch.Tensor, choosers: Sequence[Chooser]) -> Sequence[Chosen | Failed]:
    """Chooses for all rows at once; if that fails, for each by itself, so that only the rows at fault fail.

    Shapes: scores `[n, v]`.
    """
    try:
        return choose(scores, choosers)
    except NumericsError:
        raise
    except Exception:
        chosen: list[Chosen | Failed] = []
        for row, chooser in enumerate(choosers):
            try:
                chosen += choose(scores[row : row + 1], [chooser])
            except Exception:
                chosen.append(Failed(traceback.format_exc()))
        return chosen


def _message(result: Chosen | Failed) -> Any:
    return result.reason if isinstance(result, Failed) else (result.token, result.logprob, result.top)


def _of_message(value: Any) -> Chosen | Failed:
    if isinstance(value, str):
        return Failed(value)
    token, logprob, top = value
    return Chosen(token, logprob, tuple((other, number) for other, number in top))
