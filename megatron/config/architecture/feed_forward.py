"""Feed-forward: inner width, activation, gate; dense or with experts."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import flag, network_flag
from megatron.config.flags.section import ConfigSection

MICRO_BATCH, SAMPLE, GLOBAL = "micro_batch", "sample", "global"
BY_PROBABILITY, BY_POSITION = "probs", "position"
ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu", "elu", "linear")


@dataclass(frozen=True)
class FeedForwardFields(ConfigSection):
    """The dense feed-forward layer."""

    ffn_hidden_size: int = network_flag(
        help="inner width of the MLP; 4 x hidden size if unset (--swiglu: 8/3 x hidden size, down to a multiple of 64)",
        computed=lambda model: 4 * model.hidden_size,
        at_least=1,
        at_most=2**28,
        follows=("hidden_size",),
    )
    openai_gelu: bool = flag(False, "tanh approximation of GELU, as in OpenAI's code")
    bias_gelu_fusion: bool = flag(
        True, "tanh approximation of GELU, as in upstream's fused kernel; off: exact GELU unless --openai-gelu"
    )
    activation_function: str = network_flag(
        help="activation of the feed-forward; gelu_tanh if unset, gelu with --no-bias-gelu-fusion",
        computed=lambda model: "gelu_tanh" if model.bias_gelu_fusion or model.openai_gelu else "gelu",
        choices=ACTIVATIONS,
    )
    gated_linear_unit: bool = network_flag(False, "multiply the activation of one product by a second product (GLU)")
    glu_linear_offset: float = network_flag(0.0, "added to the second product of a gated feed-forward")
    activation_func_clamp_value: float | None = network_flag(
        None,
        "limit of the products of a gated feed-forward: from above of what is activated, in size of the other",
        above=0,
    )
    mlp_bias: bool = network_flag(
        help="biases of the feed-forward matrices; as --add-bias-linear if unset",
        computed=lambda model: model.add_bias_linear,
    )
    hidden_dropout: float = flag(0.1, "dropout on block outputs and on the embedding", at_least=0, below=1)


@dataclass(frozen=True)
class ExpertFields(ConfigSection):
    """Mixture of experts: routed feed-forward layers.

    Source of the flags: NVIDIA Megatron-LM `megatron/training/arguments.py`, `_add_moe_args`, and deepspeedai's fork.
    """

    num_experts: int = network_flag(
        1,
        "feed-forward networks per layer that tokens are routed to; several numbers give one for each layer with "
        "experts",
        at_least=1,
        at_most=2**16,
        by_layer="moe_expert_counts",
    )
    moe_expert_counts: tuple[int, ...] = network_flag(
        (),
        "experts of each layer that --moe-layer-pattern gives experts, in order, if they differ; with half as many "
        "numbers as layers, every second layer has experts",
        at_least=1,
        at_most=2**16,
    )
    moe_layer_pattern: tuple[int, ...] = network_flag(
        (), "1 for layers with experts, 0 for dense ones, repeated over the layers; all if unset", choices=(0, 1)
    )
    moe_router_topk: int = network_flag(2, "experts per token", at_least=1)
    moe_ffn_hidden_size: int = network_flag(
        help="inner width of an expert; --ffn-hidden-size if unset",
        computed=lambda model: model.ffn_hidden_size,
        at_least=1,
        at_most=2**28,
        follows=("ffn_hidden_size", "hidden_size"),
    )
    moe_shared_expert_intermediate_size: int = network_flag(
        0, "inner width of an expert that sees every token; 0 for none", at_least=0, at_most=2**28
    )
    moe_mlp_bias: bool = network_flag(False, "biases of the matrices of routed experts")
    moe_router_bias: bool = network_flag(False, "learned bias of the router's logits")
    moe_residual: bool = network_flag(
        False,
        "residual experts: a dense feed-forward layer of --ffn-hidden-size sees every token as well, and learned "
        "coefficients mix the two",
    )
    moe_router_score_function: str = network_flag(
        "softmax", "how router logits become scores", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = network_flag(
        False, "softmax over all experts, before the choice; off: over the chosen ones only, so weights sum to 1"
    )
    moe_router_keep_scores: bool = network_flag(
        False, "sigmoid scores are the weights; off: divided by their sum, unless a token goes to a single expert"
    )
    moe_router_topk_scaling_factor: float = network_flag(1.0, "factor of the experts' weights", above=0)
    moe_router_num_groups: int | None = network_flag(
        None, "groups of consecutive experts, such as those of a node; a token goes to a few groups only", at_least=1
    )
    moe_router_group_topk: int | None = network_flag(None, "groups that the experts of a token lie in", at_least=1)
    moe_router_group_scored_experts: int = network_flag(
        help="best experts of a group, whose scores it is chosen by; --moe-router-topk / -group-topk if unset",
        computed=lambda model: max(1, model.moe_router_topk // (model.moe_router_group_topk or 1)),
        at_least=1,
        follows=("moe_router_topk", "moe_router_group_topk"),
    )
    moe_router_enable_expert_bias: bool = network_flag(
        False, "add a bias to the scores that experts are chosen by, which follows their load instead of a loss"
    )
    moe_router_bias_update_rate: float = flag(1.0e-3, "change of that bias in a step", at_least=0, at_most=1)
    moe_expert_capacity_factor: float | None = flag(
        None,
        "tokens that an expert takes of a micro-batch, relative to an even load; the others are dropped. No token is "
        "dropped if unset",
        above=0,
        at_most=2**16,
        spelled=("--moe-train-capacity-factor",),
        remedy="Use 1.0 for as many as an even load needs, or drop the flag to drop no token.",
    )
    moe_eval_capacity_factor: float | None = flag(
        None, "the same in evaluation; as in training if unset", above=0, at_most=2**16
    )
    moe_min_capacity: int = flag(4, "least number of tokens that an expert with a capacity takes", at_least=0)
    moe_token_drop_policy: str = flag(
        BY_PROBABILITY,
        "which tokens an expert with a capacity prefers: those with the largest weights, or the first ones",
        choices=(BY_PROBABILITY, BY_POSITION),
    )
    disable_moe_token_dropping: bool = flag(False, "drop no token, whatever capacity is given")
    moe_aux_loss_coeff: float = flag(
        help="coefficient of the load-balancing loss; 0.01 if unset, 0 with --moe-router-enable-expert-bias",
        computed=lambda model: 0.0 if model.moe_router_enable_expert_bias else 0.01,
        at_least=0,
        spelled=("--moe-loss-coeff",),
    )
    moe_aux_loss_scope: str = flag(
        MICRO_BATCH,
        "tokens over which the load is to be even: of a micro-batch, of each sample, or of the global batch, whose "
        "loss does not depend on --micro-batch-size",
        choices=(MICRO_BATCH, SAMPLE, GLOBAL),
    )
    moe_z_loss_coeff: float = flag(0.0, "coefficient of the router's z-loss", at_least=0)

    @property
    def drops_tokens(self) -> bool:
        """Whether an expert takes only so many tokens."""
        return self.moe_expert_capacity_factor is not None and not self.disable_moe_token_dropping

    @property
    def keeps_scores(self) -> bool:
        """Whether a token's weights are its scores, whatever their sum."""
        if self.moe_router_score_function == "softmax":
            return self.moe_router_pre_softmax
        return self.moe_router_keep_scores or self.moe_router_topk == 1

    @property
    def balances_global_batch(self) -> bool:
        """Whether there is a load-balancing loss for the global batch."""
        return self.moe_aux_loss_scope == GLOBAL and self.moe_aux_loss_coeff > 0
