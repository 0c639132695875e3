"""Weight initialization, muP, and constant multipliers in the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.flags.fields import flag, network_flag
from megatron.config.flags.section import ConfigSection

NORMAL, TRUNCATED_NORMAL, SMALL = "normal", "truncated_normal", "small"
XAVIER_UNIFORM, XAVIER_NORMAL = "xavier_uniform", "xavier_normal"
SCALED, SAME, WANG = "scaled", "same", "wang"


def _logit_multiplier(model: Any) -> float:
    """Default logit multiplier: 1; with muP --mup-output-mult, or base width / width if that is 1."""
    if not model.use_mup:
        return 1.0
    return model.mup_output_mult if model.mup_output_mult != 1.0 else 1.0 / model.width_ratio


@dataclass(frozen=True)
class ScaleFields(ConfigSection):
    """Output layer, initialization, muP, and multipliers of embedding, residual branches and logits.

    Source of the muP flags: NVIDIA Megatron-LM `megatron/core/transformer/transformer_config.py`.
    """

    untie_embeddings_and_output_weights: bool = network_flag(
        False, "use separate weights for the embedding and the output layer"
    )
    init_method_std: float = flag(
        0.02, "standard deviation of the normal distribution used for weight initialization", at_least=0, at_most=1000
    )
    init_method_xavier_uniform: bool = flag(False, "same as --init-method xavier_uniform")
    init_method: str = flag(
        help="weight initialization: normal and truncated_normal (cut at 3 standard deviations) with "
        "--init-method-std; small: normal with std sqrt(2 / (5 hidden size)); normal if unset",
        computed=lambda model: XAVIER_UNIFORM if model.init_method_xavier_uniform else NORMAL,
        choices=(NORMAL, TRUNCATED_NORMAL, SMALL, XAVIER_UNIFORM, XAVIER_NORMAL),
        synonyms={"small_init": SMALL},
        follows=("init_method_xavier_uniform",),
    )
    output_layer_init_method: str = flag(
        help="initialization of the projections back into the residual stream: scaled by 1 / sqrt(2 layers), same as "
        "the others, or normal with std 2 / (layers sqrt(hidden size)) (wang); scaled if unset, same with xavier",
        computed=lambda model: SAME if model.init_method in (XAVIER_UNIFORM, XAVIER_NORMAL) else SCALED,
        choices=(SCALED, SAME, WANG),
        synonyms={"scaled_normal": SCALED, "wang_init": WANG},
        follows=("init_method", "init_method_xavier_uniform"),
    )
    embedding_init_method_std: float | None = flag(
        None,
        "standard deviation of the normal initialization of embeddings; as --init-method if unset",
        at_least=0,
        at_most=1000,
    )
    use_mup: bool = network_flag(
        False,
        "use the maximal update parametrization (muP): the optimal learning rate does not depend on the width",
    )
    mup_base_hidden_size: int | None = network_flag(
        None,
        "muP: hidden size of the base model; --hidden-size if unset",
        at_least=1,
        spelled=("--scaling-base-hidden-size",),
    )
    mup_base_head_dim: float | None = network_flag(
        None,
        "muP: head size of the base model, whose square root multiplies the attention scores; 1 if unset",
        above=0,
        spelled=("--scaling-base-head-dim",),
    )
    mup_attn_scale_power: float = network_flag(
        1.0, "muP: power of the head size that divides the attention scores", at_least=0, at_most=6
    )
    mup_output_mult: float = network_flag(1.0, "muP: multiplier of the logits; at 1, base width / width", above=0)
    embedding_multiplier: float = network_flag(
        1.0, "multiplier of the word embedding", above=0, spelled=("--mup-embedding-mult",)
    )
    residual_multiplier: float = network_flag(1.0, "multiplier of the output of each residual branch", above=0)
    logit_multiplier: float = network_flag(
        help="multiplier of the logits; 1 if unset, base width / width with --use-mup",
        computed=_logit_multiplier,
        above=0,
        follows=("use_mup", "mup_base_hidden_size", "mup_output_mult", "hidden_size"),
    )
    output_logit_softcap: float | None = network_flag(
        None, "soft cap of the output logits: c * tanh(logit / c)", above=0
    )
