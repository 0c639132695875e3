"""Continues prompts token by token, with or without a key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.errors import ConfigError
from megatron.inference.sampling import Chooser, Sampling, choose
from megatron.model.gpt import whole_logits
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import StepSettings
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import broadcast


@dataclass(frozen=True)
class Continuation:
    """The tokens generated for one prompt; `is_finished` says whether end-of-document (not included) was reached."""

    tokens: tuple[int, ...]
    is_finished: bool


@dataclass(frozen=True)
class Limits:
    """Limits on the length of a text.

    Args:
        new_tokens: maximum number of tokens generated for one prompt.
        positions: maximum number of tokens of a text, prompt included (--max-position-embeddings).
        eod_id: the end-of-document token; None if there is none.
        short_context: length beyond which the keys of all tokens change (`PositionFields.short_context`); None if they
            never do.
    """

    new_tokens: int
    positions: int
    eod_id: int | None
    short_context: int | None = None

    def check_prompt(self, length: int, name: str) -> None:
        """Checks that a prompt leaves at least one position for a new token.

        Raises:
            ConfigError: it is empty or fills all positions.
        """
        if length == 0:
            raise ConfigError(
                f"{name} has no tokens. Give at least one word, or use --num-samples to generate without a prompt."
            )
        if length >= self.positions:
            raise ConfigError(
                f"{name} has {length} tokens, and the model has {self.positions} positions (--max-position-embeddings "
                f"{self.positions}). Shorten it to at most {self.positions - 1}."
            )


@torch.inference_mode()
def generate(
    model: LayerStack,
    mesh: ParallelMesh,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling,
    *,
    vocab_size: int,
    first_sample: int = 0,
    recompute: bool = False,
) -> list[Continuation]:
    """Continues prompts of equal length; every tensor-parallel rank returns the same result.

    Args:
        model: this rank's layers, in evaluation mode.
        vocab_size: tokens that may be chosen: those the tokenizer knows, of which the network may have more.
        first_sample: index of the first prompt; together with the seed it determines the draws.
        recompute: process the whole text for every token instead of using a key-value cache.

    Raises:
        ConfigError: a prompt is empty or too long, or the prompts differ in length.
    """
    if len({len(prompt) for prompt in prompts}) > 1:
        lengths = ", ".join(str(len(prompt)) for prompt in prompts)
        raise ConfigError(
            f"prompts of different lengths ({lengths} tokens) cannot share a batch. Pass them one by one."
        )
    for number, prompt in enumerate(prompts, start=first_sample):
        limits.check_prompt(len(prompt), f"prompt {number}")
    length = len(prompts[0])
    stop = min(length + limits.new_tokens, limits.positions)
    text = torch.tensor([list(prompt) for prompt in prompts], dtype=torch.int64, device=mesh.device)  # [b, s]
    sample_ids = torch.arange(first_sample, first_sample + len(prompts), device=mesh.device)  # [b]
    choosers = [Chooser(sampling, prompt, first_sample + row) for row, prompt in enumerate(prompts)]
    finished = torch.zeros(len(prompts), dtype=torch.bool, device=mesh.device)
    caches = None if recompute else model.new_caches(stop)
    fresh = text
    while text.shape[1] < stop and not bool(finished.all()):
        if caches and caches.length <= (limits.short_context or 0) < text.shape[1]:
            caches.truncate(0)
            fresh = text
        context = StepSettings().context(sample_ids, first_sample=first_sample, caches=caches)
        scores = model(text if recompute else fresh, context)[:, -1]  # [b, v/t]
        tokens = [found.token for found in choose(whole_logits(scores, mesh.tp, vocab_size), choosers)]
        chosen = torch.tensor(tokens, device=mesh.device)  # [b]
        if limits.eod_id is not None:
            chosen = torch.where(finished, torch.full_like(chosen, limits.eod_id), chosen)
            finished = finished | (chosen == limits.eod_id)
        broadcast(chosen, mesh.tp)
        fresh = chosen.unsqueeze(1)
        text = torch.cat([text, fresh], dim=1)
    return [_continuation(row, limits.eod_id) for row in text[:, length:].tolist()]


def _continuation(tokens: list[int], eod_id: int | None) -> Continuation:
    if eod_id is not None and eod_id in tokens:
        return Continuation(tuple(tokens[: tokens.index(eod_id)]), True)
    return Continuation(tuple(tokens), False)
