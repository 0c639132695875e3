"""What happens at the end of every step, whoever runs the network: tokens are chosen, and some texts end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.errors import ConfigError, MegatronError, NumericsError
from megatron.inference.generation.request import Finish, Request
from megatron.inference.loading import LoadedModel
from megatron.inference.sampling import Chooser, Chosen, choose
from megatron.model.gpt import whole_logits
from megatron.parallel.messages import broadcast_json


def check_request(request: Request, loaded: LoadedModel) -> None:
    """Checks that a network can continue a request.

    Raises:
        ConfigError: the prompt fills all positions, or it or the logit bias has a token that there is not.
    """
    length, positions = len(request.prompt), loaded.positions
    if length >= positions:
        raise ConfigError(
            f"The prompt of request {request.id} has {length} tokens, and the model has {positions} positions "
            f"(--max-position-embeddings {positions}). Shorten it to at most {positions - 1}."
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
    """Why a text ends with its newest token; None if it goes on.

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
    """
    mesh = loaded.mesh
    found: list[Chosen] = []
    answer: dict[str, Any] = {}
    if scores is not None:
        whole = whole_logits(scores, mesh.tp, loaded.vocab_size)  # [n, v]
        if mesh.tp.rank == 0:
            try:
                found = choose(whole, choosers)
                answer["chosen"] = [(one.token, one.logprob, one.top) for one in found]
            except MegatronError as failure:
                answer["failure"] = str(failure)
    if mesh.model.size > 1:
        answer = broadcast_json(answer, mesh.model, source=(mesh.pp.size - 1) * mesh.tp.size)
    if "failure" in answer:
        raise NumericsError(answer["failure"])
    if mesh.model.size == 1:
        return found
    return [
        Chosen(token, logprob, tuple((other, value) for other, value in top))
        for token, logprob, top in answer["chosen"]
    ]
