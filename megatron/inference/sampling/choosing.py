"""The choice of the next token of every sequence of a batch.

A draw inverts the cumulative distribution, in the order of the vocabulary, at a number that is a hash of (seed, sample,
tokens chosen so far). So it has no state that a batch, a layout or an interruption could change, and scores that differ
by rounding give another token about as rarely as their probabilities differ.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.errors import NumericsError
from megatron.inference.sampling.processing import adjust, warp
from megatron.inference.sampling.settings import Sampling

_UNIFORM_BITS = 52  # with one more, rounding could reach the end of the distribution


@dataclass(frozen=True)
class Chosen:
    """A chosen token.

    Log-probabilities are those of the network's distribution, before bias, penalties, temperature and cuts.

    Attributes:
        logprob: of the token, in nats.
        top: the most probable tokens and their log-probabilities, highest first, as many as were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Chooser:
    """The state of one sequence: its settings, and the tokens that penalties and draws depend on.

    Args:
        prompt: tokens before the first choice.
        sample: index of the sequence; together with the seed it determines all draws.
        top_logprobs: number of most probable tokens reported with each choice.
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
        """Notes the token that was chosen; `choose` does it."""
        self._chosen += 1
        if self.sampling.penalizes:
            self.counts[token] += 1
            self._seen[token] = None

    def draw(self) -> float:
        """A number in [0, 1), uniformly distributed over seeds, samples and tokens."""
        digest = hashlib.blake2b(f"{self.sampling.seed}/{self.sample}/{self._chosen}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> (64 - _UNIFORM_BITS)) / 2**_UNIFORM_BITS


@torch.no_grad()
def choose(scores: torch.Tensor, choosers: Sequence[Chooser]) -> list[Chosen]:
    """Chooses one token per row, on the CPU, and appends it to the row's chooser; to none if any row fails.

    Shapes: scores `[b, v]`.

    Raises:
        NumericsError: a row has NaN or +inf among its scores, or no finite one.
        ConfigError: a logit bias is for a token that the vocabulary does not have.
    """
    scores = scores.to("cpu", torch.float32)
    highest, tokens = scores.max(dim=-1)  # NaN if there is any
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
    found = []
    for row, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
        found.append(Chosen(token, logprob, _top(scores[row], normalizers[row], choosers[row].top_logprobs)))
    for chooser, chosen in zip(choosers, found, strict=True):
        chooser.append(chosen.token)
    return found


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
    """The tokens at which the cumulative distributions pass the draws.

    Shapes: warped `[b, v]`, with the highest score of a row at 0; draws `[b]`; result `[b]` int64.
    """
    mass = warped.exp().cumsum(dim=-1, dtype=torch.float64)
    targets = torch.tensor(draws, dtype=torch.float64).unsqueeze(1) * mass[:, -1:]  # [b, 1]
    return torch.searchsorted(mass, targets, right=True).squeeze(1)  # [b]; never a token of probability 0


def _top(scores: torch.Tensor, normalizer: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The most probable tokens of a row `[v]`."""
    if not count:
        return ()
    found = (scores - normalizer).topk(min(count, len(scores)))
    return tuple(zip(found.indices.tolist(), found.values.tolist(), strict=True))
