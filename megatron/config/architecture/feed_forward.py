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
        help="MLP hidden size; 4 x hidden size if unset (--swiglu: 8/3 x, rounded down to a multiple of 64)",
        computed=lambda model: 4 * model.hidden_size,
        at_least=1,
        at_most=2**28,
        follows=("hidden_size",),
    )
    openai_gelu: bool = flag(False, "use the tanh approximation of GELU, as in OpenAI's code")
    bias_gelu_fusion: bool = flag(
        True, "tanh approximation of GELU, as in upstream's fused kernel; exact GELU without it, unless --openai-gelu"
    )
    activation_function: str = network_flag(
        help="MLP activation; gelu_tanh if unset, gelu with --no-bias-gelu-fusion",
        computed=lambda model: "gelu_tanh" if model.bias_gelu_fusion or model.openai_gelu else "gelu",
        choices=ACTIVATIONS,
    )
    gated_linear_unit: bool = network_flag(
        False, "gated linear unit: multiply the activation by a second linear projection"
    )
    glu_linear_offset: float = network_flag(0.0, "offset added to the linear input of the gated linear unit")
    activation_func_clamp_value: float | None = network_flag(
        None,
        "clamp the gate input of the gated linear unit from above, and its linear input to +/- this value",
        above=0,
    )
    mlp_bias: bool = network_flag(
        help="biases in the MLP; same as --add-bias-linear if unset",
        computed=lambda model: model.add_bias_linear,
    )
    hidden_dropout: float = flag(0.1, "dropout probability of block outputs and of the embedding", at_least=0, below=1)


@dataclass(frozen=True)
class ExpertFields(ConfigSection):
    """Mixture of experts: routed feed-forward layers.

    Source of the flags: NVIDIA Megatron-LM `megatron/training/arguments.py`, `_add_moe_args`, and deepspeedai's fork.
    """

    num_experts: int = network_flag(
        1,
        "experts per MoE layer, 1 for a dense network; several values give one for each MoE layer",
        at_least=1,
        at_most=2**16,
        by_layer="moe_expert_counts",
    )
    moe_expert_counts: tuple[int, ...] = network_flag(
        (),
        "experts of each MoE layer, in order, if they differ; with half as many values as layers, every second layer "
        "is an MoE layer",
        at_least=1,
        at_most=2**16,
    )
    moe_layer_pattern: tuple[int, ...] = network_flag(
        (), "1 for MoE layers, 0 for dense ones, repeated over the layers; all 1 if unset", choices=(0, 1)
    )
    moe_router_topk: int = network_flag(2, "experts that each token is routed to", at_least=1)
    moe_ffn_hidden_size: int = network_flag(
        help="hidden size of an expert; --ffn-hidden-size if unset",
        computed=lambda model: model.ffn_hidden_size,
        at_least=1,
        at_most=2**28,
        follows=("ffn_hidden_size", "hidden_size"),
    )
    moe_shared_expert_intermediate_size: int = network_flag(
        0, "hidden size of the shared expert, which receives every token; 0 for none", at_least=0, at_most=2**28
    )
    moe_mlp_bias: bool = network_flag(False, "biases in routed experts")
    moe_router_bias: bool = network_flag(False, "learned bias of the router logits")
    moe_residual: bool = network_flag(
        False,
        "residual MoE: add a dense MLP of --ffn-hidden-size in parallel, mixed with the experts by learned "
        "coefficients",
    )
    moe_router_score_function: str = network_flag(
        "softmax", "score function of the router", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = network_flag(
        False, "softmax over all experts, before top-k; without it over the selected experts, so that weights sum to 1"
    )
    moe_router_keep_scores: bool = network_flag(
        False, "use sigmoid scores as weights; without it they are normalized to sum to 1, except with top-1"
    )
    moe_router_topk_scaling_factor: float = network_flag(1.0, "scaling factor of the routing weights", above=0)
    moe_router_num_groups: int | None = network_flag(
        None, "groups of consecutive experts (for example, one per node) for group-limited routing", at_least=1
    )
    moe_router_group_topk: int | None = network_flag(None, "groups selected for each token", at_least=1)
    moe_router_group_scored_experts: int = network_flag(
        help="top experts whose scores rank a group; --moe-router-topk / --moe-router-group-topk if unset",
        computed=lambda model: max(1, model.moe_router_topk // (model.moe_router_group_topk or 1)),
        at_least=1,
        follows=("moe_router_topk", "moe_router_group_topk"),
    )
    moe_router_enable_expert_bias: bool = network_flag(
        False, "auxiliary-loss-free balancing: a bias per expert, updated from its load, added to the scores for top-k"
    )
    moe_router_bias_update_rate: float = flag(1.0e-3, "update of the expert bias per step", at_least=0, at_most=1)
    moe_expert_capacity_factor: float | None = flag(
        None,
        "expert capacity relative to an even load of the micro-batch; tokens above it are dropped. No token is dropped "
        "if unset",
        above=0,
        at_most=2**16,
        spelled=("--moe-train-capacity-factor",),
        remedy="Use 1.0 for the capacity of an even load, or omit the flag to drop no token.",
    )
    moe_eval_capacity_factor: float | None = flag(
        None, "expert capacity in evaluation; same as in training if unset", above=0, at_most=2**16
    )
    moe_min_capacity: int = flag(4, "minimum expert capacity in tokens", at_least=0)
    moe_token_drop_policy: str = flag(
        BY_PROBABILITY,
        "tokens kept by an expert at capacity: those with the largest weights, or the first ones",
        choices=(BY_PROBABILITY, BY_POSITION),
    )
    disable_moe_token_dropping: bool = flag(False, "never drop tokens, regardless of the capacity factor")
    moe_aux_loss_coeff: float = flag(
        help="coefficient of the load-balancing loss; 0.01 if unset, 0 with --moe-router-enable-expert-bias",
        computed=lambda model: 0.0 if model.moe_router_enable_expert_bias else 0.01,
        at_least=0,
        spelled=("--moe-loss-coeff",),
    )
    moe_aux_loss_scope: str = flag(
        MICRO_BATCH,
        "tokens over which the load is balanced: a micro-batch, each sample, or the global batch, with which the loss "
        "does not depend on --micro-batch-size",
        choices=(MICRO_BATCH, SAMPLE, GLOBAL),
    )
    moe_z_loss_coeff: float = flag(0.0, "coefficient of the router's z-loss", at_least=0)

    @property
    def drops_tokens(self) -> bool:
        return self.moe_expert_capacity_factor is not None and not self.disable_moe_token_dropping

    @property
    def keeps_scores(self) -> bool:
        """True if routing weights are the scores, not normalized to sum to 1."""
        if self.moe_router_score_function == "softmax":
            return self.moe_router_pre_softmax
        return self.moe_router_keep_scores or self.moe_router_topk == 1

    @property
    def balances_global_batch(self) -> bool:
        return self.moe_aux_loss_scope == GLOBAL and self.moe_aux_loss_coeff > 0
