"""Normalization layers: their kind, and their position in a block."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import SMALLEST_FLOAT32, network_flag
from megatron.config.flags.section import ConfigSection

LAYER_NORM, RMS_NORM = "LayerNorm", "RMSNorm"
PRE, SANDWICH, POST_BRANCH, POST = "pre", "sandwich", "post_branch", "post"


@dataclass(frozen=True)
class NormFields(ConfigSection):
    """Kind and position of the norms."""

    normalization: str = network_flag(
        LAYER_NORM,
        "normalization layer",
        choices=(LAYER_NORM, RMS_NORM),
        synonyms={"layernorm": LAYER_NORM, "rmsnorm": RMS_NORM},
    )
    layernorm_epsilon: float = network_flag(
        1e-5, "epsilon of the normalization layers", at_least=SMALLEST_FLOAT32, spelled=("--norm-epsilon",)
    )
    apply_layernorm_1p: bool = network_flag(False, "zero-centered norm weights: store the difference from 1")
    embed_layernorm: bool = network_flag(
        False, "normalize the word embedding; in an encoder, the sum of all embeddings"
    )
    norm_placement: str = network_flag(
        PRE,
        "position of the norms: before attention and MLP (pre), before and after them (sandwich), only after them "
        "(post_branch), or after the residual addition as in the original BERT, without a final norm (post)",
        choices=(PRE, SANDWICH, POST_BRANCH, POST),
    )
    apply_residual_connection_post_layernorm: bool = network_flag(
        False, "take the residual after the norm instead of before it"
    )
    parallel_residual: bool = network_flag(
        False,
        "compute attention and MLP in parallel from the block's input and add both outputs to it",
        spelled=("--use-parallel-residual", "--gpt-j-residual"),
    )
