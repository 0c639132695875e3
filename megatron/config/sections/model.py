"""The model architecture: fields that a checkpoint must match."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron.config.architecture.attention import AttentionFields
from megatron.config.architecture.dropout import dropout_problems
from megatron.config.architecture.encoder import EncoderFields
from megatron.config.architecture.feed_forward import ExpertFields, FeedForwardFields
from megatron.config.architecture.latent_attention import LatentAttentionFields, unused_latent_fields, yarn_magnitude
from megatron.config.architecture.multi_token import MultiTokenFields
from megatron.config.architecture.norms import NormFields
from megatron.config.architecture.positions import PositionFields
from megatron.config.architecture.scales import ScaleFields
from megatron.config.flags.fields import MUST_MATCH, derived, flags_of, network_flag


@dataclass(frozen=True)
class ModelRequest(
    ScaleFields,
    NormFields,
    MultiTokenFields,
    PositionFields,
    EncoderFields,
    ExpertFields,
    FeedForwardFields,
    AttentionFields,
    LatentAttentionFields,
):
    """The requested architecture: its parts, and properties that follow from several of them."""

    vocab_size: int | None = network_flag(
        None, "vocabulary size before padding; the tokenizer's if unset", at_least=1, at_most=2**31 - 1
    )

    def complete(self) -> None:
        counts = self.moe_expert_counts
        if not counts:
            return
        if self.num_experts == 1:
            self.set_derived("num_experts", max(counts))
        if not self.moe_layer_pattern and len(counts) == self.num_layers // 2 != self.num_layers:
            self.set_derived("moe_layer_pattern", (0, 1))
        if set(counts) == {self.num_experts} and len(counts) == self.expert_layers:
            self.set_derived("moe_expert_counts", ())  # the same as one number for all layers

    def problems(self) -> Iterator[str]:
        yield from dropout_problems("--attention-dropout", self.attention_dropout)
        yield from dropout_problems("--hidden-dropout", self.hidden_dropout)

    def pattern_index(self, layer: int) -> int:
        """Index of block `layer` in layer patterns; blocks of multi-token prediction count as the last block."""
        return min(layer, self.num_layers - 1)

    def window_of(self, layer: int) -> int | None:
        """The window of block `layer` in tokens, itself included; None for full attention."""
        pattern = self.attention_window_pattern
        windowed = not pattern or bool(pattern[self.pattern_index(layer) % len(pattern)])
        return self.attention_window if windowed else None

    @property
    def widest_window(self) -> int | None:
        """The window if every block has one; None if some block has full attention."""
        is_full = any(self.window_of(layer) is None for layer in range(self.num_layers))
        return None if is_full else self.attention_window

    @property
    def value_channels(self) -> int:
        """Channels of a value head."""
        return self.v_head_dim if self.multi_latent_attention else self.kv_channels

    @property
    def yarn_factor(self) -> float:
        """YaRN's default factor of cos and sin."""
        factor = self.rope_scaling_factor
        if not self.multi_latent_attention:
            return yarn_magnitude(factor, 1.0)
        return yarn_magnitude(factor, self.mscale) / yarn_magnitude(factor, self.mscale_all_dim)

    @property
    def rotary_width(self) -> int:
        """Channels of a head that RoPE rotates; even."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return int(self.kv_channels * self.rotary_percent) // 2 * 2

    @property
    def width_ratio(self) -> float:
        """Width / base width under muP; 1 without it."""
        base = self.mup_base_hidden_size
        return self.hidden_size / base if self.use_mup and base and self.hidden_size > 0 else 1.0

    def experts_of(self, layer: int) -> int:
        """Number of routed experts of block `layer`; 1 for a dense layer."""
        if not self._may_have_experts(layer):
            return 1
        if not self.moe_expert_counts:
            return self.num_experts
        index = sum(self._may_have_experts(before) for before in range(self.pattern_index(layer)))
        return self.moe_expert_counts[index]

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """The numbers of experts of the MoE layers."""
        counts = (self.moe_expert_counts or (self.num_experts,)) if self.num_experts > 1 else ()
        return tuple(count for count in counts if count > 1)

    def has_experts(self, layer: int) -> bool:
        return self.experts_of(layer) > 1

    @property
    def expert_layers(self) -> int:
        return sum(self._may_have_experts(layer) for layer in range(self.num_layers))

    def _may_have_experts(self, layer: int) -> bool:
        pattern = self.moe_layer_pattern
        return not pattern or bool(pattern[self.pattern_index(layer) % len(pattern)])

    @property
    def widths(self) -> dict[str, int]:
        """The widths that are split over tensor-parallel ranks, by flag.

        They include the hidden size for the biases of expert outputs and for the projection of multi-token prediction.
        """
        widths = {"--moe-ffn-hidden-size": self.moe_ffn_hidden_size} if self.num_experts != 1 else {}
        is_dense = self.num_experts == 1 or 0 in self.moe_layer_pattern[: self.num_layers]
        if is_dense or self.moe_residual or 1 in self.moe_expert_counts:
            widths["--ffn-hidden-size"] = self.ffn_hidden_size
        if (self.num_experts != 1 and self.moe_mlp_bias) or self.mtp_num_layers:
            widths["--hidden-size"] = self.hidden_size
        if self.num_experts != 1 and self.moe_shared_expert_intermediate_size:
            widths["--moe-shared-expert-intermediate-size"] = self.moe_shared_expert_intermediate_size
        return widths


@dataclass(frozen=True)
class ModelConfig(ModelRequest):
    """The architecture with its vocabulary size."""

    vocab_size: int = derived("vocabulary size before padding", resume=MUST_MATCH)
    padded_vocab_size: int = derived("rows of the word embedding over all tensor-parallel ranks")


# The values of --rope-scaling-type that use a field.
_SCALINGS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "rope_scaling_factor": ("linear", "dynamic", "llama3", "yarn"),
        "rope_original_max_positions": ("dynamic", "llama3", "yarn", "longrope"),
        "rope_low_freq_factor": ("llama3",),
        "rope_high_freq_factor": ("llama3",),
        "rope_beta_fast": ("yarn",),
        "rope_beta_slow": ("yarn",),
        "yarn_correction_range_round_to_int": ("yarn",),
        "rope_attention_factor": ("yarn", "longrope"),
        "rope_short_factors": ("longrope",),
        "rope_long_factors": ("longrope",),
    }
)


def unused_fields(model: ModelRequest) -> dict[str, str]:
    """Fields without effect in this network, with the flag each requires, or "with" the flag that disables it."""
    names = [flag.field for flag in flags_of(ModelRequest)]
    unused: dict[str, str] = {}
    if not model.uses_rope:
        rotary = [name for name in names if name.startswith(("rotary_", "rope_", "yarn_"))]
        unused.update(dict.fromkeys(rotary, "RoPE (--position-embedding-type rope)"))
    for name, kinds in _SCALINGS.items():
        if model.rope_scaling_type not in kinds:
            unused.setdefault(name, f"--rope-scaling-type {' or '.join(kinds)}")
    if model.attention_window is None:
        unused.setdefault("rotary_base_windowed", "--attention-window")
    if not model.gated_linear_unit:
        unused.update(dict.fromkeys(("glu_linear_offset", "activation_func_clamp_value"), "--gated-linear-unit"))
    if not model.qk_layernorm:
        unused["qk_layernorm_scope"] = "--qk-layernorm"
    if not model.drops_tokens:
        capacity = ("moe_eval_capacity_factor", "moe_min_capacity", "moe_token_drop_policy")
        unused.update(dict.fromkeys(capacity, "--moe-expert-capacity-factor"))
    if not model.moe_router_enable_expert_bias:
        unused["moe_router_bias_update_rate"] = "--moe-router-enable-expert-bias"
    if model.moe_router_num_groups is None:
        unused["moe_router_group_scored_experts"] = "--moe-router-num-groups"
    if model.moe_router_score_function == "softmax":
        unused["moe_router_keep_scores"] = "--moe-router-score-function sigmoid"
    elif model.moe_router_topk == 1:
        unused["moe_router_keep_scores"] = "--moe-router-topk above 1"
    if model.moe_router_score_function == "sigmoid":
        unused["moe_router_pre_softmax"] = "--moe-router-score-function softmax"
    if model.num_experts == 1:
        unused.update({name: "--num-experts" for name in names if name.startswith("moe_")})
    if not model.mtp_num_layers:
        unused["mtp_loss_scaling_factor"] = "--mtp-num-layers"
    if not model.activation_function.startswith("gelu"):
        unused["openai_gelu"] = "--activation-function gelu"
    return unused | unused_latent_fields(model)
