"""What a layer costs: parameters and operations, known without building it and without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenWork:
    """What a run computes for a token.

    Attributes:
        pairs: how many tokens it attends to.
        head_share: in how many of all tokens it passes through the head.
    """

    pairs: int = 0
    head_share: float = 1.0


MATRICES_ONLY = TokenWork()


@dataclass(frozen=True)
class LayerCost:
    """The cost of a layer, over all ranks that share it.

    Attributes:
        parameters: number of parameters.
        flops_per_token: forward FLOPs per token, without attention scores.
        flops_per_token_pair: forward FLOPs per (query, key) pair.
    """

    parameters: int
    flops_per_token: int = 0
    flops_per_token_pair: int = 0

    def flops(self, pairs: int) -> int:
        """Forward FLOPs of a token that attends to so many."""
        return self.flops_per_token + self.flops_per_token_pair * pairs
