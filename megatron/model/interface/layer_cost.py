"""The cost of a layer in parameters and operations, without building it and without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenWork:
    """The work of a run per token.

    Attributes:
        pairs: number of tokens that a token attends to.
        head_share: share of the tokens that pass through the head.
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
        """Forward FLOPs of a token that attends to `pairs` tokens."""
        return self.flops_per_token + self.flops_per_token_pair * pairs
