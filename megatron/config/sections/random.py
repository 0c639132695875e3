"""The seed that every random choice of a run follows from."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import RUN_MUST_MATCH, flag
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class RandomConfig(ConfigSection):
    """Randomness of a run."""

    seed: int = flag(
        1234,
        "seed of weights, dropout and data order",
        at_least=1,
        at_most=2**32 - 1,  # NumPy's RandomState, which shuffles the data, takes no more
        resume=RUN_MUST_MATCH,
    )
