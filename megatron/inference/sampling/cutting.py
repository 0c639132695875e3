"""The removal of improbable tokens before a draw: top-k, top-p, min-p and typicality, in this order.

Sorting a vocabulary takes about as long as a small network. So a row is sorted only as far as its settings usually
need, and again as a whole if that was not enough. Which of the two happens depends on the row alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from megatron.inference.sampling.settings import Sampling

_CANDIDATES = 512  # the most probable tokens, which are nearly always all that top-p and min-p keep


def cut(scores: torch.Tensor, settings: Sequence[Sampling], candidates: int = _CANDIDATES) -> torch.Tensor:
    """Gives -inf to the tokens that each row's settings exclude.

    Shapes: scores `[b, v]`, with 0 as the highest of a row, to the same.

    Args:
        candidates: how many tokens are looked at first where the settings do not say it.

    Source: Fan et al., "Hierarchical neural story generation", 2018, section 5 (top-k); Holtzman et al., "The curious
    case of neural text degeneration", 2020, section 3.1 (top-p); Nguyen et al., "Turning up the heat: min-p sampling",
    2024 (min-p).
    """
    result = torch.full_like(scores, float("-inf"))
    widths = defaultdict(list)
    for row, one in enumerate(settings):
        widths[_width(one, scores.shape[1], candidates)].append(row)
    whole = widths.pop(scores.shape[1], [])
    for width, rows in widths.items():
        whole += _cut_candidates(scores, settings, rows, width, result)
    if whole:
        ordered, order = scores[whole].sort(dim=-1, descending=True, stable=True)
        own = [settings[row] for row in whole]
        kept = _typical(_probable(ordered, own, torch.zeros(len(whole), 1)), ordered, own)
        result[whole] = result[whole].scatter(1, order, ordered.masked_fill(~kept, float("-inf")))
    return result


def _width(one: Sampling, vocabulary: int, candidates: int) -> int:
    """How many of the most probable tokens to look at first; all of them if fewer would not save time."""
    fewer = one.top_k or (candidates if 0 < one.top_p < 1 or one.min_p > 0 else vocabulary)
    return fewer if 4 * fewer < vocabulary else vocabulary


def _cut_candidates(
    scores: torch.Tensor, settings: Sequence[Sampling], rows: list[int], width: int, result: torch.Tensor
) -> list[int]:
    """Cuts rows by their `width` most probable tokens, into `result`; returns the rows for which these are too few."""
    own_settings, own_scores = [settings[row] for row in rows], scores[rows]
    ids = own_scores.topk(width, dim=-1).indices.sort(dim=-1).values
    ordered, order = own_scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)  # equal scores in the order of the vocabulary, as in a whole row
    kept = _probable(ordered, own_settings, own_scores.exp().sum(dim=-1, keepdim=True, dtype=torch.float64))
    last = ordered[:, -1:]
    outside = (own_scores == last).sum(dim=-1) > (ordered == last).sum(dim=-1)
    has_last = (kept & (ordered == last)).any(dim=-1)
    by_rank = torch.tensor([one.top_k > 0 for one in own_settings])
    is_too_narrow = torch.where(by_rank, outside, has_last)
    cut_scores = ordered.masked_fill(~_typical(kept, ordered, own_settings), float("-inf"))
    again = []
    for place, (row, fails) in enumerate(zip(rows, is_too_narrow.tolist(), strict=True)):
        if fails:
            again.append(row)
        else:
            result[row].scatter_(0, ids[place], cut_scores[place])
    return again


def _probable(ordered: torch.Tensor, settings: Sequence[Sampling], everything: torch.Tensor) -> torch.Tensor:
    """Which of the most probable tokens of each row top-k, top-p and min-p keep.

    Shapes: ordered `[b, n]`, descending from 0; everything `[b, 1]`; result `[b, n]` bool.

    Args:
        everything: the sum of exponentials of the whole row, where n is less than that.
    """
    width = ordered.shape[1]
    ranks = _column(settings, lambda one: min(one.top_k, width) or width, torch.int64) - 1
    kept = ordered >= ordered.gather(1, ranks)  # ties with the k-th stay
    weights = torch.where(kept, ordered.exp(), 0.0).to(torch.float64)
    mass = weights.cumsum(dim=-1)
    is_ranked = _column(settings, lambda one: one.top_k > 0, torch.bool)
    total = torch.where(is_ranked, mass[:, -1:], torch.maximum(mass[:, -1:], everything))
    reached_before = (mass - weights) / total  # by the more probable tokens alone
    kept &= reached_before < _column(settings, lambda one: one.top_p if 0 < one.top_p < 1 else 2.0, torch.float64)
    return kept & (weights >= _column(settings, lambda one: one.min_p, torch.float64))  # the highest weight is 1


def _typical(kept: torch.Tensor, ordered: torch.Tensor, settings: Sequence[Sampling]) -> torch.Tensor:
    """Which of the kept tokens of each row stay by their typicality, in rows that ask for it.

    Shapes: kept `[b, n]` bool, ordered `[b, n]`; result as kept.
    """
    rows = [row for row, one in enumerate(settings) if 0 < one.typical_p < 1]
    if not rows:
        return kept
    wanted = _column([settings[row] for row in rows], lambda one: one.typical_p, torch.float64)
    weights = torch.where(kept[rows], ordered[rows].exp(), 0.0).to(torch.float64)
    result = kept.clone()
    result[rows] &= _is_typical(weights, wanted)
    return result


def _is_typical(weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Which tokens are needed for a probability of `wanted` if those nearest to the entropy come first; ties stay.

    Shapes: weights `[b, v]`, wanted `[b, 1]`; result `[b, v]` bool.

    Source: Meister et al., "Locally typical sampling", 2023, equations 10 and 11.
    """
    probabilities = weights / weights.sum(dim=-1, keepdim=True)
    information = -probabilities.log()
    entropy = torch.where(probabilities > 0, probabilities * information, 0.0).sum(dim=-1, keepdim=True)
    distance, order = (information - entropy).abs().sort(dim=-1, stable=True)
    mass = probabilities.gather(1, order).cumsum(dim=-1)
    last = (mass < wanted).sum(dim=-1, keepdim=True).clamp(max=weights.shape[1] - 1)
    return torch.zeros_like(weights, dtype=torch.bool).scatter(1, order, distance <= distance.gather(1, last))


def _column(settings: Sequence[Sampling], value: Callable[[Sampling], float], dtype: torch.dtype) -> torch.Tensor:
    """One value per row. Shapes: result `[b, 1]`."""
    return torch.tensor([value(one) for one in settings], dtype=dtype).unsqueeze(1)
