"""Norms: which kind, and where they are in a block."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import SMALLEST_FLOAT32, network_flag
from megatron.config.flags.section import ConfigSection

LAYER_NORM, RMS_NORM = "LayerNorm", "RMSNorm"
PRE, SANDWICH, POST_BRANCH, POST = "pre", "sandwich", "post_branch", "post"


@dataclass(frozen=True)
class NormFields(ConfigSection):
    """Kind and place of the norms."""

    normalization: str = network_flag(
        LAYER_NORM,
        "kind of norm",
        choices=(LAYER_NORM, RMS_NORM),
        synonyms={"layernorm": LAYER_NORM, "rmsnorm": RMS_NORM},
    )
    layernorm_epsilon: float = network_flag(
        1e-5, "epsilon of every norm", at_least=SMALLEST_FLOAT32, spelled=("--norm-epsilon",)
    )
    apply_layernorm_1p: bool = network_flag(False, "norm weights are stored as their difference from 1 (zero-centred)")
    embed_layernorm: bool = network_flag(
        False, "a norm right after the word embedding; in an encoder after the sum of all embeddings"
    )
    norm_placement: str = network_flag(
        PRE,
        "norms before attention and feed-forward, both before and after them, only after them, or after the residual "
        "additions (post: the original BERT, without a final norm)",
        choices=(PRE, SANDWICH, POST_BRANCH, POST),
    )
    apply_residual_connection_post_layernorm: bool = network_flag(
        False, "the residual is taken after the norm instead of before it"
    )
    parallel_residual: bool = network_flag(
        False,
        "attention and feed-forward both read the block's input, and both outputs are added to it",
        spelled=("--use-parallel-residual", "--gpt-j-residual"),
    )
