"""Feed-forward: inner width, activation, gate; dense or with experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.architecture.attention import AttentionFields
from megatron.config.architecture.dropout import dropout_problems
from megatron.config.flags.fields import flag, network_flag

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "squared_relu", "silu", "elu", "linear")


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
    moe_residual: bool = network_flag(
        False,
        "residual experts: a dense feed-forward layer of --ffn-hidden-size sees every token as well, and learned "
        "coefficients mix the two",
    )
    moe_router_score_function: str = network_flag(
        "softmax", "how router logits become scores", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = network_flag(
        False, "weights are the scores over all experts; off: over the chosen ones only, so they sum to 1"
    )
    moe_router_topk_scaling_factor: float = network_flag(1.0, "factor of the experts' weights", above=0)
    moe_aux_loss_coeff: float = flag(
        0.01, "coefficient of the load-balancing loss", at_least=0, spelled=("--moe-loss-coeff",)
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

    def experts_of(self, layer: int) -> int:
        """Feed-forward networks of block `layer` that tokens are routed to; 1 for a dense layer."""
        if not self._may_have_experts(layer):
            return 1
        if not self.moe_expert_counts:
            return self.num_experts
        place = sum(self._may_have_experts(before) for before in range(layer))
        return self.moe_expert_counts[place]

    def has_experts(self, layer: int) -> bool:
        """Whether block `layer` routes tokens to experts."""
        return self.experts_of(layer) > 1

    def _may_have_experts(self, layer: int) -> bool:
        pattern = self.moe_layer_pattern
        return not pattern or bool(pattern[layer % len(pattern)])

    @property
    def widths(self) -> dict[str, int]:
        """The inner widths of the feed-forward layers that the network has, by flag."""
        if self.num_experts == 1:
            return {"--ffn-hidden-size": self.ffn_hidden_size}
        widths = {"--moe-ffn-hidden-size": self.moe_ffn_hidden_size}
        if self.moe_residual or 0 in self.moe_layer_pattern[: self.num_layers] or 1 in self.moe_expert_counts:
            widths["--ffn-hidden-size"] = self.ffn_hidden_size
        if self.moe_shared_expert_intermediate_size:
            widths["--moe-shared-expert-intermediate-size"] = self.moe_shared_expert_intermediate_size
        return widths

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self._count_problems()
        fewest = min((count for count in self.moe_expert_counts if count > 1), default=self.num_experts)
        if self.num_experts > 1 and self.moe_router_topk > fewest:
            yield (
                f"--moe-router-topk {self.moe_router_topk} is more than --num-experts {fewest}. A token "
                f"cannot go to more experts than there are."
            )
        if self.num_experts > 1 and self.moe_router_topk == 1 and not self.moe_router_pre_softmax:
            yield (
                f"--moe-router-topk 1 with --num-experts {self.num_experts} needs --moe-router-pre-softmax. The "
                "weights of the chosen experts sum to 1, so the weight of a single one is constant and the router "
                "would learn nothing."
            )

    def _count_problems(self) -> Iterator[str]:
        """Numbers of experts by layer: one for each layer that has some, and the largest equals --num-experts."""
        counts = self.moe_expert_counts
        if not counts:
            return
        shown = " ".join(map(str, counts))
        layers = sum(self._may_have_experts(layer) for layer in range(self.num_layers))
        if len(counts) != layers:
            yield (
                f"--num-experts {shown} has {len(counts)} numbers, and {layers} of the {self.num_layers} layers "
                f"have experts (--num-layers, --expert-interval). Give {layers} numbers, or one for all layers."
            )
        if max(counts) != self.num_experts:
            yield (
                f"--num-experts {self.num_experts} is not the largest of --moe-expert-counts {shown}. Drop "
                "--num-experts, which follows from them."
            )
