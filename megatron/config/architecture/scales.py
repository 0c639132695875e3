"""Initial values of the weights, and fixed factors inside the network."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import MUST_MATCH, flag
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class ScaleFields(ConfigSection):
    """Output head, initial values, and factors of embedding, residual branches and logits."""

    untie_embeddings_and_output_weights: bool = flag(
        False, "an output matrix of its own instead of the word embedding", resume=MUST_MATCH
    )
    init_method_std: float = flag(
        0.02, "standard deviation of the normal distribution that weights are drawn from", at_least=0
    )
    embedding_multiplier: float = flag(1.0, "factor of the word embedding", above=0, resume=MUST_MATCH)
    residual_multiplier: float = flag(1.0, "factor of every branch that is added to the residual", above=0,
                                      resume=MUST_MATCH)  # fmt: skip
    logit_multiplier: float = flag(1.0, "factor of the logits", above=0, resume=MUST_MATCH)
    output_logit_softcap: float | None = flag(
        None, "logits are kept below this by c * tanh(logit / c)", above=0, resume=MUST_MATCH
    )
