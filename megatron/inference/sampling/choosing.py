"""The choice of the next token of every sequence of a batch.

A draw inverts the cumulative distribution, in the order of the vocabulary, at a number that is a hash of (seed, sample,
tokens chosen so far). So it is stateless and independent of batch, layout and interruptions, and scores that differ by
rounding change a token only as rarely as probabilities differ.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.errors import ConfigError, NumericsError
from megatron.inference.sampling.settings import Sampling

_UNIFORM_BITS = 52  # with more, rounding could reach the end of the distribution
_SMALLEST_TEMPERATURE = 1e-30  # smaller ones are 0 in float32; the distribution no longer changes below
_CANDIDATES = 512  # most probable tokens; nearly always a superset of what top-p and min-p keep


@dataclass(frozen=True)
class TokenChoice:
    """A chosen token.

    Log-probabilities are the network's, before bias, penalties, temperature and cuts.

    Attributes:
        logprob: log-probability of the token, in nats.
        top: the requested number of most probable tokens with their log-probabilities, highest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Chooser:
    """The state of one sequence: its settings, and its tokens, for penalties and draws.

    Args:
        prompt: tokens before the first choice.
        sample: index of the sequence; together with the seed it determines all draws.
        top_logprobs: number of most probable tokens to report with each choice.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int], sample: int = 0, top_logprobs: int = 0) -> None:
        self.sampling = sampling
        self.sample = sample
        self.top_logprobs = top_logprobs
        self.counts: Counter[int] = Counter()
        self._prompt = tuple(prompt) if sampling.repetition_penalty != 1 else ()
        self._seen = dict.fromkeys(self._prompt)
        self._chosen = 0

    @property
    def seen(self) -> Sequence[int]:
        """The tokens that the repetition penalty applies to, each once."""
        return list(self._seen)

    def append(self, token: int) -> None:
        """Appends the chosen token; called by `choose`."""
        self._chosen += 1
        if self.sampling.penalizes:
            self.counts[token] += 1
            self._seen[token] = None

    def draw(self) -> float:
        """A number in [0, 1), uniformly distributed over seeds, samples and tokens."""
        digest = hashlib.blake2b(f"{self.sampling.seed}/{self.sample}/{self._chosen}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> (64 - _UNIFORM_BITS)) / 2**_UNIFORM_BITS


@torch.no_grad()
def choose(scores: torch.Tensor, choosers: Sequence[Chooser]) -> list[TokenChoice]:
    """Chooses one token per row, on the CPU, and appends it to the row's chooser, unless any row fails.

    Shapes: scores `[b, v]`.

    Raises:
        NumericsError: a row has NaN or +inf among its scores, or no finite one.
        ConfigError: a logit bias for a token outside of the vocabulary.
    """
    scores = scores.to("cpu", torch.float32)
    highest, tokens = scores.max(dim=-1)  # NaN if any score is
    _check_finite(highest, choosers)
    normalizers = scores.logsumexp(dim=-1)
    adjusted = adjust(scores, choosers)
    if adjusted is not scores:
        tokens = adjusted.argmax(dim=-1)
    drawn = [row for row, chooser in enumerate(choosers) if not chooser.sampling.is_greedy]
    if drawn:
        warped = warp(adjusted[drawn], [choosers[row].sampling for row in drawn])
        tokens[drawn] = _inverse(warped, [choosers[row].draw() for row in drawn])
    logprobs = scores.gather(1, tokens.unsqueeze(1)).squeeze(1) - normalizers
    all_chosen = []
    for row, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
        all_chosen.append(TokenChoice(token, logprob, _top(scores[row], normalizers[row], choosers[row].top_logprobs)))
    for chooser, chosen in zip(choosers, all_chosen, strict=True):
        chooser.append(chosen.token)
    return all_chosen


@torch.no_grad()
def score(scores: torch.Tensor, tokens: Sequence[int], choosers: Sequence[Chooser]) -> list[TokenChoice]:
    """Returns the report of `choose` for given tokens, one per row, on the CPU; does not change the choosers.

    Shapes: scores `[n, v]`.

    Raises:
        NumericsError: a row has NaN or +inf among its scores, or no finite one.
    """
    scores = scores.to("cpu", torch.float32)
    _check_finite(scores.amax(dim=-1), choosers)
    normalizers = scores.logsumexp(dim=-1)
    logprobs = scores.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1) - normalizers
    return [
        TokenChoice(token, logprob, _top(scores[row], normalizers[row], choosers[row].top_logprobs))
        for row, (token, logprob) in enumerate(zip(tokens, logprobs.tolist(), strict=True))
    ]


def _check_finite(highest: torch.Tensor, choosers: Sequence[Chooser]) -> None:
    wrong = torch.nonzero(~highest.isfinite()).flatten().tolist()
    if wrong:
        value = highest[wrong[0]].item()
        reason = "no finite value" if value < 0 else "NaN" if value != value else "+inf"
        raise NumericsError(
            f"the scores of the next token of sample {choosers[wrong[0]].sample} have {reason}, so none can be chosen. "
            "The weights of the checkpoint are not finite, or too large for the dtype: try --bf16 or float32."
        )


def _inverse(warped: torch.Tensor, draws: Sequence[float]) -> torch.Tensor:
    """The first tokens whose cumulative probability exceeds the draw.

    Shapes: warped `[b, v]`, with the highest score of a row at 0; draws `[b]`; result `[b]` int64.
    """
    mass = warped.exp().cumsum(dim=-1, dtype=torch.float64)
    targets = torch.tensor(draws, dtype=torch.float64).unsqueeze(1) * mass[:, -1:]  # [b, 1]
    return torch.searchsorted(mass, targets, right=True).squeeze(1)  # [b]; never a token of probability 0


def _top(scores: torch.Tensor, normalizer: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The most probable tokens of a row `[v]`."""
    if not count:
        return ()
    best = (scores - normalizer).topk(min(count, len(scores)))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def adjust(scores: torch.Tensor, choosers: Sequence[Chooser]) -> torch.Tensor:
    """Adds the logit bias, then applies the repetition, frequency and presence penalties; copies if anything changes.

    Shapes: `[b, v]` to the same.

    Raises:
        ConfigError: a bias for a token outside of the vocabulary.

    Source: Keskar et al., "CTRL", 2019, section 4.1 (repetition penalty; negative scores are multiplied, as in
    transformers); OpenAI's API reference (bias, frequency and presence penalty); vLLM `v1/sample/sampler.py` (order).
    """
    if not any(chooser.sampling.adjusts for chooser in choosers):
        return scores
    scores = scores.clone()
    for row, chooser in enumerate(choosers):
        sampling = chooser.sampling
        if sampling.logit_bias:
            _add_bias(scores[row], sampling.logit_bias)
        if sampling.repetition_penalty != 1 and chooser.seen:
            seen = torch.tensor(chooser.seen)
            before = scores[row, seen]
            penalty = sampling.repetition_penalty
            scores[row, seen] = torch.where(before < 0, before * penalty, before / penalty)
        if (sampling.frequency_penalty or sampling.presence_penalty) and chooser.counts:
            generated = torch.tensor(list(chooser.counts))
            counts = torch.tensor(list(chooser.counts.values()), dtype=torch.float32)
            scores[row, generated] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return scores


def warp(scores: torch.Tensor, settings: Sequence[Sampling]) -> torch.Tensor:
    """Divides by the temperature, then excludes tokens by top-k, top-p, min-p and typical-p, in this order.

    Excluded tokens get -inf. The highest score of each row becomes 0, so that no temperature overflows.

    Shapes: `[b, v]` to the same.

    Source: the order is as in Megatron-LM `text_generation_utils.py` (temperature, top-k, top-p), and as in
    transformers for the others.
    """
    temperatures = [max(one.temperature, _SMALLEST_TEMPERATURE) for one in settings]
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / torch.tensor(temperatures).unsqueeze(1)
    cutting = [row for row, one in enumerate(settings) if one.cuts]
    if cutting:
        scores[cutting] = cut(scores[cutting], [settings[row] for row in cutting])
    return scores


def _add_bias(scores: torch.Tensor, biases: Sequence[tuple[int, float]]) -> None:
    """Adds biases to the scores of one row `[v]`, in place."""
    ids, values = zip(*biases, strict=True)
    if max(ids) >= len(scores):
        raise ConfigError(
            f"logit_bias has token {max(ids)}, and the vocabulary ends at {len(scores) - 1}. Remove that token."
        )
    scores.index_add_(0, torch.tensor(ids, dtype=torch.int64), torch.tensor(values, dtype=scores.dtype))


def cut(scores: torch.Tensor, settings: Sequence[Sampling], candidates: int = _CANDIDATES) -> torch.Tensor:
    """Sets the tokens that each row's settings exclude to -inf.

    Sorting a vocabulary takes about as long as a small network. So a row is sorted only as far as its settings usually
    need, and completely if that was not enough; this depends only on the row.

    Shapes: scores `[b, v]`, with 0 as the highest of a row, to the same.

    Args:
        candidates: number of tokens to examine first, unless the settings imply it.

    Source: Fan et al., "Hierarchical neural story generation", 2018, section 5 (top-k); Holtzman et al., "The curious
    case of neural text degeneration", 2020, section 3.1 (top-p); Nguyen et al., "Turning up the heat: min-p sampling",
    2024 (min-p).
    """
    result = torch.full_like(scores, float("-inf"))
    widths = defaultdict(list)
    for row, one in enumerate(settings):
        widths[_width(one, scores.shape[1], candidates)].append(row)
    complete = widths.pop(scores.shape[1], [])
    for width, rows in widths.items():
        complete += _cut_candidates(scores, settings, rows, width, result)
    if complete:
        ordered, order = scores[complete].sort(dim=-1, descending=True, stable=True)
        chosen = [settings[row] for row in complete]
        kept = _typical(_probable(ordered, chosen, torch.zeros(len(complete), 1)), ordered, chosen)
        result[complete] = result[complete].scatter(1, order, ordered.masked_fill(~kept, float("-inf")))
    return result


def _width(one: Sampling, vocabulary: int, candidates: int) -> int:
    """The number of most probable tokens to examine first; all if fewer would not save time."""
    fewer = one.top_k or (candidates if 0 < one.top_p < 1 or one.min_p > 0 else vocabulary)
    return fewer if 4 * fewer < vocabulary else vocabulary


def _cut_candidates(
    scores: torch.Tensor, settings: Sequence[Sampling], rows: list[int], width: int, result: torch.Tensor
) -> list[int]:
    """Cuts rows by their `width` most probable tokens, into `result`; returns the rows that need more."""
    row_settings, row_scores = [settings[row] for row in rows], scores[rows]
    ids = row_scores.topk(width, dim=-1).indices.sort(dim=-1).values
    ordered, order = row_scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)  # equal scores in vocabulary order, as in a complete row
    kept = _probable(ordered, row_settings, row_scores.exp().sum(dim=-1, keepdim=True, dtype=torch.float64))
    last = ordered[:, -1:]
    outside = (row_scores == last).sum(dim=-1) > (ordered == last).sum(dim=-1)
    has_last = (kept & (ordered == last)).any(dim=-1)
    by_rank = torch.tensor([one.top_k > 0 for one in row_settings])
    is_too_narrow = torch.where(by_rank, outside, has_last)
    cut_scores = ordered.masked_fill(~_typical(kept, ordered, row_settings), float("-inf"))
    again = []
    for index, (row, fails) in enumerate(zip(rows, is_too_narrow.tolist(), strict=True)):
        if fails:
            again.append(row)
        else:
            result[row].scatter_(0, ids[index], cut_scores[index])
    return again


def _probable(ordered: torch.Tensor, settings: Sequence[Sampling], everything: torch.Tensor) -> torch.Tensor:
    """The mask of the most probable tokens that top-k, top-p and min-p keep in each row.

    Shapes: ordered `[b, n]`, descending from 0; everything `[b, 1]`; result `[b, n]` bool.

    Args:
        everything: sum of the exponentials of the complete row, if n is smaller.
    """
    width = ordered.shape[1]
    ranks = _column(settings, lambda one: min(one.top_k, width) or width, torch.int64) - 1
    kept = ordered >= ordered.gather(1, ranks)  # ties with the k-th stay
    weights = torch.where(kept, ordered.exp(), 0.0).to(torch.float64)
    mass = weights.cumsum(dim=-1)
    is_ranked = _column(settings, lambda one: one.top_k > 0, torch.bool)
    total = torch.where(is_ranked, mass[:, -1:], torch.maximum(mass[:, -1:], everything))
    reached_before = (mass - weights) / total  # by more probable tokens
    kept &= reached_before < _column(settings, lambda one: one.top_p if 0 < one.top_p < 1 else 2.0, torch.float64)
    return kept & (weights >= _column(settings, lambda one: one.min_p, torch.float64))  # the highest weight is 1


def _typical(kept: torch.Tensor, ordered: torch.Tensor, settings: Sequence[Sampling]) -> torch.Tensor:
    """The mask of the kept tokens after typical-p, in rows that set it.

    Shapes: kept `[b, n]` bool, ordered `[b, n]`; result as kept.
    """
    rows = [row for row, one in enumerate(settings) if 0 < one.typical_p < 1]
    if not rows:
        return kept
    mass_limit = _column([settings[row] for row in rows], lambda one: one.typical_p, torch.float64)
    weights = torch.where(kept[rows], ordered[rows].exp(), 0.0).to(torch.float64)
    result = kept.clone()
    result[rows] &= _is_typical(weights, mass_limit)
    return result


def _is_typical(weights: torch.Tensor, mass_limit: torch.Tensor) -> torch.Tensor:
    """The mask of the tokens nearest to the entropy whose probabilities add up to `mass_limit`; ties stay.

    Shapes: weights `[b, v]`, mass_limit `[b, 1]`; result `[b, v]` bool.

    Source: Meister et al., "Locally typical sampling", 2023, equations 10 and 11.
    """
    probabilities = weights / weights.sum(dim=-1, keepdim=True)
    information = -probabilities.log()
    entropy = torch.where(probabilities > 0, probabilities * information, 0.0).sum(dim=-1, keepdim=True)
    distance, order = (information - entropy).abs().sort(dim=-1, stable=True)
    mass = probabilities.gather(1, order).cumsum(dim=-1)
    last = (mass < mass_limit).sum(dim=-1, keepdim=True).clamp(max=weights.shape[1] - 1)
    return torch.zeros_like(weights, dtype=torch.bool).scatter(1, order, distance <= distance.gather(1, last))


def _column(settings: Sequence[Sampling], value: Callable[[Sampling], float], dtype: torch.dtype) -> torch.Tensor:
    """One value per row. Shapes: result `[b, 1]`."""
    return torch.tensor([value(one) for one in settings], dtype=dtype).unsqueeze(1)
