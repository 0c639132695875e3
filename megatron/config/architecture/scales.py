"""Initial values of the weights, muP, and fixed factors inside the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.flags.fields import flag, network_flag
from megatron.config.flags.section import ConfigSection

NORMAL, TRUNCATED_NORMAL, SMALL = "normal", "truncated_normal", "small"
XAVIER_UNIFORM, XAVIER_NORMAL = "xavier_uniform", "xavier_normal"
SCALED, SAME, WANG = "scaled", "same", "wang"


def _logit_multiplier(model: Any) -> float:
    """The factor of the logits that is not given: 1, with muP the inverse of the width."""
    if not model.use_mup:
        return 1.0
    return model.mup_output_mult if model.mup_output_mult != 1.0 else 1.0 / model.width_ratio


@dataclass(frozen=True)
class ScaleFields(ConfigSection):
    """Output head, initial values, muP, and factors of embedding, residual branches and logits.

    Source of the muP flags: NVIDIA Megatron-LM `megatron/core/transformer/transformer_config.py`.
    """

    untie_embeddings_and_output_weights: bool = network_flag(
        False, "a separate output matrix instead of the word embedding"
    )
    init_method_std: float = flag(
        0.02, "standard deviation of the normal distribution that weights are drawn from", at_least=0, at_most=1000
    )
    init_method_xavier_uniform: bool = flag(False, "synonym for --init-method xavier_uniform")
    init_method: str = flag(
        help="distribution of the initial weights: normal and truncated_normal (cut at 3 standard deviations) with "
        "--init-method-std; small: normal with sqrt(2 / (5 hidden size)); normal if unset",
        computed=lambda model: XAVIER_UNIFORM if model.init_method_xavier_uniform else NORMAL,
        choices=(NORMAL, TRUNCATED_NORMAL, SMALL, XAVIER_UNIFORM, XAVIER_NORMAL),
        synonyms={"small_init": SMALL},
        follows=("init_method_xavier_uniform",),
    )
    output_layer_init_method: str = flag(
        help="initial weights of the matrices that write to the residual stream: scaled by 1 / sqrt(2 layers), the "
        "same as the others, or normal with 2 / (layers sqrt(hidden size)) (wang); scaled if unset, same with xavier",
        computed=lambda model: SAME if model.init_method in (XAVIER_UNIFORM, XAVIER_NORMAL) else SCALED,
        choices=(SCALED, SAME, WANG),
        synonyms={"scaled_normal": SCALED, "wang_init": WANG},
        follows=("init_method", "init_method_xavier_uniform"),
    )
    embedding_init_method_std: float | None = flag(
        None,
        "standard deviation of the embeddings' initial values, normally distributed; as --init-method if unset",
        at_least=0,
        at_most=1000,
    )
    use_mup: bool = network_flag(
        False,
        "maximal update parametrization: initial values, learning rates and factors that keep the best learning rate "
        "the same at every width",
    )
    mup_base_hidden_size: int | None = network_flag(
        None,
        "muP: the hidden size at which nothing is scaled; --hidden-size if unset",
        at_least=1,
        spelled=("--scaling-base-hidden-size",),
    )
    mup_base_head_dim: float | None = network_flag(
        None,
        "muP: the head width whose square root the attention scores are multiplied by; 1 if unset",
        above=0,
        spelled=("--scaling-base-head-dim",),
    )
    mup_attn_scale_power: float = network_flag(
        1.0, "muP: attention scores are divided by the head width to this power", at_least=0, at_most=6
    )
    mup_output_mult: float = network_flag(
        1.0, "muP: factor of the logits; at 1, the inverse of the width in base widths", above=0
    )
    embedding_multiplier: float = network_flag(
        1.0, "factor of the word embedding", above=0, spelled=("--mup-embedding-mult",)
    )
    residual_multiplier: float = network_flag(1.0, "factor of every branch that is added to the residual", above=0)
    logit_multiplier: float = network_flag(
        help="factor of the logits; 1 if unset, with --use-mup the inverse of the width in base widths",
        computed=_logit_multiplier,
        above=0,
        follows=("use_mup", "mup_base_hidden_size", "mup_output_mult", "hidden_size"),
    )
    output_logit_softcap: float | None = network_flag(
        None, "logits are kept below this by c * tanh(logit / c)", above=0
    )
