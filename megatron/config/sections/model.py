"""The architecture: what a checkpoint must match, and nothing about how the network is trained."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.architecture.encoder import EncoderFields
from megatron.config.architecture.feed_forward import ExpertFields
from megatron.config.architecture.norms import NormFields
from megatron.config.architecture.positions import PositionFields
from megatron.config.architecture.scales import ScaleFields
from megatron.config.flags.fields import MUST_MATCH, derived, flag


@dataclass(frozen=True)
class ModelRequest(ScaleFields, NormFields, PositionFields, ExpertFields, EncoderFields):
    """The architecture that was asked for."""

    vocab_size: int | None = flag(
        None,
        "entries of the network's vocabulary; the tokenizer's tokens if unset",
        at_least=1,
        at_most=2**31 - 1,
        resume=MUST_MATCH,
    )


@dataclass(frozen=True)
class ModelConfig(ModelRequest):
    """The architecture with the size of its vocabulary, as every layer sees it."""

    vocab_size: int = derived("entries of the network's vocabulary", resume=MUST_MATCH)
    padded_vocab_size: int = derived("rows of the word embedding over all tensor-parallel ranks")
