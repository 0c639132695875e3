"""Sampling of the next token: temperature, top-k, top-p, and a draw that depends only on (seed, sample)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. `greedy` takes the most probable token and ignores the other settings.

    Args:
        temperature: divisor of the logits; above 0.
        top_k: keep only the k most probable tokens, and ties with the k-th; 0 keeps all.
        top_p: keep the most probable tokens until their cumulative probability reaches this value; 0 keeps all.
        seed: together with the index of a sample, it determines all draws of that sample.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int = 1234


def sample_generator(seed: int, sample: int) -> torch.Generator:
    """The random generator of one sample, independent of the batch and the layout."""
    digest = hashlib.sha256(f"{seed}/{sample}".encode()).digest()
    generator = torch.Generator(device="cpu")
    generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return generator


def choose(scores: torch.Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Chooses one token per row, on the CPU.

    Shapes: scores `[b, v]`; result `[b]` int64.

    Args:
        generators: one per row; each is advanced by one draw unless greedy.
    """
    scores = scores.to("cpu", torch.float32)
    if sampling.greedy:
        return scores.argmax(dim=-1)
    probabilities = distribution(scores, sampling)
    rows = [torch.multinomial(row, 1, generator=draws) for row, draws in zip(probabilities, generators, strict=True)]
    return torch.cat(rows)  # [b]


def distribution(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Token probabilities after temperature, top-k and top-p, applied in this order.

    Shapes: `[b, v]` to the same, float32.

    Source: Holtzman et al., "The curious case of neural text degeneration", 2020, section 3.1 (top-p); order of the
    steps as in Megatron-LM `text_generation_utils.py`.
    """
    scores = scores.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        smallest_kept = scores.topk(sampling.top_k, dim=-1).values[:, -1:]  # [b, 1]
        scores = scores.masked_fill(scores < smallest_kept, float("-inf"))
    if 0 < sampling.top_p < 1:
        scores = _cut_tail(scores, sampling.top_p)
    return scores.softmax(dim=-1)


def _cut_tail(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Removes the tokens that are not needed to reach the cumulative probability `top_p`.

    Shapes: `[b, v]` to the same.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    reached_before = probabilities.cumsum(dim=-1) - probabilities  # by the more probable tokens alone
    removed = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, reached_before > top_p)
    return scores.masked_fill(removed, float("-inf"))
