"""What happens to the scores of a batch before a token is drawn: bias and penalties, temperature, cuts.

Each row has its own settings, and its result is the same in any batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from megatron.errors import ConfigError
from megatron.inference.sampling.cutting import cut
from megatron.inference.sampling.settings import Sampling

_SMALLEST_TEMPERATURE = 1e-30  # a smaller one is 0 in float32; the distribution has no more to lose by then


class History(Protocol):
    """The tokens of a sequence so far, as the penalties see them."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def seen(self) -> Sequence[int]: ...
    @property
    def counts(self) -> Mapping[int, int]: ...


def adjust(scores: torch.Tensor, histories: Sequence[History]) -> torch.Tensor:
    """Adds the logit bias, then applies the repetition, the frequency and the presence penalty; a copy if any does.

    Shapes: `[b, v]` to the same.

    Raises:
        ConfigError: a bias is for a token that the vocabulary does not have.

    Source: Keskar et al., "CTRL", 2019, section 4.1 (repetition penalty; negative scores are multiplied, as in
    transformers); OpenAI's API reference (bias, frequency and presence penalty); vLLM `v1/sample/sampler.py` (order).
    """
    if not any(history.sampling.adjusts for history in histories):
        return scores
    scores = scores.clone()
    for row, history in enumerate(histories):
        sampling = history.sampling
        if sampling.logit_bias:
            _add_bias(scores[row], sampling.logit_bias)
        if sampling.repetition_penalty != 1 and history.seen:
            seen = torch.tensor(history.seen)
            before = scores[row, seen]
            penalty = sampling.repetition_penalty
            scores[row, seen] = torch.where(before < 0, before * penalty, before / penalty)
        if (sampling.frequency_penalty or sampling.presence_penalty) and history.counts:
            generated = torch.tensor(list(history.counts))
            counts = torch.tensor(list(history.counts.values()), dtype=torch.float32)
            scores[row, generated] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return scores


def warp(scores: torch.Tensor, settings: Sequence[Sampling]) -> torch.Tensor:
    """Divides by the temperature, then removes tokens by top-k, top-p, min-p and typicality, in this order.

    What is removed gets -inf. The highest score of each row becomes 0, so that no temperature overflows.

    Shapes: `[b, v]` to the same.

    Source: the order is that of Megatron-LM `text_generation_utils.py` (temperature, top-k, top-p), and of transformers
    for the others.
    """
    temperatures = [max(one.temperature, _SMALLEST_TEMPERATURE) for one in settings]
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / torch.tensor(temperatures).unsqueeze(1)
    cutting = [row for row, one in enumerate(settings) if one.cuts]
    if cutting:
        scores[cutting] = cut(scores[cutting], [settings[row] for row in cutting])
    return scores


def _add_bias(scores: torch.Tensor, biases: Sequence[tuple[int, float]]) -> None:
    """Adds to the scores of one row `[v]`, in place."""
    ids, values = zip(*biases, strict=True)
    if max(ids) >= len(scores):
        raise ConfigError(
            f"logit_bias has token {max(ids)}, and the vocabulary ends at {len(scores) - 1}. Remove that token."
        )
    scores.index_add_(0, torch.tensor(ids, dtype=torch.int64), torch.tensor(values, dtype=scores.dtype))
