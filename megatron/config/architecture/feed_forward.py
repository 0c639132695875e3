"""Feed-forward: inner width, activation, gate; dense or with experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.architecture.attention import AttentionFields
from megatron.config.architecture.dropout import dropout_problems
from megatron.config.flags.fields import flag, network_flag

MICRO_BATCH, SAMPLE, GLOBAL = "micro_batch", "sample", "global"
BY_PROBABILITY, BY_POSITION = "probs", "position"
ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu", "elu", "linear")


@dataclass(frozen=True)
class FeedForwardFields(AttentionFields):
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

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from dropout_problems("--hidden-dropout", self.hidden_dropout)


@dataclass(frozen=True)
class ExpertFields(FeedForwardFields):
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

    def complete(self) -> None:
        super().complete()
        counts = self.moe_expert_counts
        if not counts:
            return
        if self.num_experts == 1:
            self.set_derived("num_experts", max(counts))
        if not self.moe_layer_pattern and len(counts) == self.num_layers // 2 != self.num_layers:
            self.set_derived("moe_layer_pattern", (0, 1))
        if set(counts) == {self.num_experts} and len(counts) == self._expert_layers:
            self.set_derived("moe_expert_counts", ())  # what one number for all layers means

    def experts_of(self, layer: int) -> int:
        """Feed-forward networks of block `layer` that tokens are routed to; 1 for a dense layer."""
        if not self._may_have_experts(layer):
            return 1
        if not self.moe_expert_counts:
            return self.num_experts
        place = sum(self._may_have_experts(before) for before in range(self.alike(layer)))
        return self.moe_expert_counts[place]

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """The numbers of experts of the layers that have some."""
        counts = (self.moe_expert_counts or (self.num_experts,)) if self.num_experts > 1 else ()
        return tuple(count for count in counts if count > 1)

    def has_experts(self, layer: int) -> bool:
        """Whether block `layer` routes tokens to experts."""
        return self.experts_of(layer) > 1

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

    @property
    def _expert_layers(self) -> int:
        """Layers that may have experts."""
        return sum(self._may_have_experts(layer) for layer in range(self.num_layers))

    def _may_have_experts(self, layer: int) -> bool:
        pattern = self.moe_layer_pattern
        return not pattern or bool(pattern[self.alike(layer) % len(pattern)])

    @property
    def widths(self) -> dict[str, int]:
        """The widths of the feed-forward layers that tensor-parallel ranks divide, by flag: the inner ones, and that of
        the experts' second biases.
        """
        if self.num_experts == 1:
            return {"--ffn-hidden-size": self.ffn_hidden_size}
        widths = {"--moe-ffn-hidden-size": self.moe_ffn_hidden_size}
        if self.moe_residual or 0 in self.moe_layer_pattern[: self.num_layers] or 1 in self.moe_expert_counts:
            widths["--ffn-hidden-size"] = self.ffn_hidden_size
        if self.moe_mlp_bias:
            widths["--hidden-size"] = self.hidden_size
        if self.moe_shared_expert_intermediate_size:
            widths["--moe-shared-expert-intermediate-size"] = self.moe_shared_expert_intermediate_size
        return widths

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self._count_problems()
        if self.num_experts > 1 and not any(map(self._may_have_experts, range(self.num_layers))):
            pattern = " ".join(map(str, self.moe_layer_pattern))
            yield (
                f"--num-experts {self.num_experts} with --moe-layer-pattern {pattern} gives none of the "
                f"{self.num_layers} layers experts. Use a pattern with a 1 for one of them, or drop --num-experts."
            )
        fewest = min((count for count in self.moe_expert_counts if count > 1), default=self.num_experts)
        if self.num_experts > 1 and self.moe_router_topk > fewest:
            yield (
                f"--moe-router-topk {self.moe_router_topk} is more than --num-experts {fewest}. A token "
                f"cannot go to more experts than there are."
            )
        if self.num_experts > 1:
            yield from self._group_problems()
        if self.num_experts > 1 and self.moe_router_topk == 1 and not self.keeps_scores:
            yield (
                f"--moe-router-topk 1 with --num-experts {self.num_experts} needs --moe-router-pre-softmax. The "
                "weights of the chosen experts sum to 1, so the weight of a single one is constant and the router "
                "would learn nothing."
            )

    def _group_problems(self) -> Iterator[str]:
        """Groups of equal size, of which a token takes as many as it has experts at most."""
        groups, chosen, top_k = self.moe_router_num_groups, self.moe_router_group_topk, self.moe_router_topk
        if (groups is None and chosen is None) or groups == 0:
            return
        if groups is None or chosen is None:
            given, other = ("group-topk", "num-groups") if groups is None else ("num-groups", "group-topk")
            yield (
                f"--moe-router-{given} {chosen if groups is None else groups} needs --moe-router-{other}. Give both, "
                "or drop it."
            )
            return
        counts = sorted({count for count in self.moe_expert_counts if count > 1} or {self.num_experts})
        uneven = next((count for count in counts if count % groups), None)
        if uneven is not None:
            sizes = (size for size in range(1, counts[0] + 1) if not any(count % size for count in counts))
            nearest = min(sizes, key=lambda size: abs(size - groups))
            yield (
                f"--num-experts {uneven} cannot be divided into --moe-router-num-groups {groups} of equal size. Use "
                f"--moe-router-num-groups {nearest}."
            )
            return
        within = min(counts) // groups
        least, most = -(-top_k // within), min(groups, top_k)
        if not least <= chosen <= most:
            yield (
                f"--moe-router-group-topk {chosen} does not go with --moe-router-topk {top_k} and "
                f"--moe-router-num-groups {groups} of {within} experts: a token's experts lie in {least} to {most} "
                f"groups. Use --moe-router-group-topk {min(max(chosen, least), most)}."
            )
        elif (counted := self.moe_router_group_scored_experts) > within:
            yield (
                f"--moe-router-group-scored-experts {counted} is more than the {within} experts of a group "
                f"(--num-experts {min(counts)}, --moe-router-num-groups {groups}). Use at most {within}."
            )

    def _count_problems(self) -> Iterator[str]:
        """Numbers of experts by layer: one for each layer that has some, and the largest equals --num-experts."""
        counts = self.moe_expert_counts
        if not counts:
            return
        shown = " ".join(map(str, counts))
        layers = self._expert_layers
        if len(counts) != layers:
            yield (
                f"--num-experts {shown} has {len(counts)} numbers, and {layers} of the {self.num_layers} layers "
                f"have experts (--num-layers, --moe-layer-pattern). Give {layers} numbers, or one for all layers."
            )
        if max(counts) != self.num_experts:
            yield (
                f"--num-experts {self.num_experts} is not the largest of --moe-expert-counts {shown}. Drop "
                "--num-experts, which follows from them."
            )
