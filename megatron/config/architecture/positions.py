"""Position encodings: learned embeddings, RoPE, or ALiBi."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import network_flag
from megatron.config.flags.section import ConfigSection
from megatron.errors import ConfigError

LEARNED, ROPE, ALIBI, NO_POSITIONS = "learned_absolute", "rope", "alibi", "none"


def _needed_positions(model: PositionFields) -> int:
    """Always raises: the default is the sequence length of another section, which `parse` fills in."""
    raise ConfigError(
        "--max-position-embeddings is required: size of the learned position embedding, at least --seq-length."
    )


@dataclass(frozen=True)
class PositionFields(ConfigSection):
    """Kind of position encoding, and the frequencies of RoPE.

    Source of the scalings: transformers, `modeling_rope_utils.py`; YaRN: Peng et al., 2023.
    """

    max_position_embeddings: int = network_flag(
        help="size of the learned position embedding, at least --seq-length; with other position encodings the context "
        "length, --seq-length if unset",
        computed=_needed_positions,
        spelled=("--max-absolute-position-embeddings",),
        at_least=1,
        at_most=2**31 - 1,
    )
    position_embedding_type: str = network_flag(
        LEARNED,
        "position encoding",
        choices=(LEARNED, ROPE, ALIBI, NO_POSITIONS),
        synonyms={
            "absolute": LEARNED,
            "learned": LEARNED,
            "rotary": ROPE,
            "PositionEmbeddingType.absolute": LEARNED,
            "PositionEmbeddingType.rotary": ROPE,
            "PositionEmbeddingType.alibi": ALIBI,
        },
    )
    rotary_percent: float = network_flag(1.0, "fraction of the head size that RoPE rotates", above=0, at_most=1)
    rotary_base: float = network_flag(
        10000.0,
        "base of the RoPE frequencies",
        at_least=1,
        spelled=("--rotary-position-embeddings-theta", "--rope-theta"),
    )
    rotary_interleaved: bool = network_flag(
        False, "rotate adjacent channels (GPT-J style) instead of the two halves of a head"
    )
    rotary_base_windowed: float | None = network_flag(
        None, "base of unscaled RoPE frequencies in sliding-window layers; as in other layers if unset", at_least=1
    )
    rope_layer_pattern: tuple[int, ...] = network_flag(
        (),
        "1 for layers with RoPE, 0 for layers without positions, repeated over the layers; all 1 if unset",
        choices=(0, 1),
    )
    rope_scaling_type: str = network_flag(
        "none",
        "scaling of the RoPE frequencies for longer contexts",
        choices=("none", "linear", "dynamic", "llama3", "yarn", "longrope"),
    )
    rope_scaling_factor: float = network_flag(
        8.0, "context extension factor of --rope-scaling-type", at_least=1, spelled=("--rotary-scaling-factor",)
    )
    rope_original_max_positions: int | None = network_flag(
        None,
        "context length before scaling; --max-position-embeddings if unset",
        at_least=1,
        spelled=("--yarn-original-max-position-embeddings",),
    )
    rope_low_freq_factor: float = network_flag(1.0, "llama3: frequencies below this factor are divided", above=0)
    rope_high_freq_factor: float = network_flag(4.0, "llama3: frequencies above this factor are unchanged", above=0)
    rope_beta_fast: float = network_flag(
        32.0, "yarn: number of rotations above which frequencies are unchanged", above=0, spelled=("--yarn-beta-fast",)
    )
    rope_beta_slow: float = network_flag(
        1.0, "yarn: number of rotations below which frequencies are divided", above=0, spelled=("--yarn-beta-slow",)
    )
    yarn_correction_range_round_to_int: bool = network_flag(
        True, "yarn: round the bounds of the interpolated channels to integers"
    )
    rope_attention_factor: float | None = network_flag(
        None, "yarn, longrope: factor applied to cos and sin; derived from the context lengths if unset", above=0
    )
    rope_short_factors: tuple[float, ...] = network_flag(
        (), "longrope: frequency divisors up to the original context", above=0
    )
    rope_long_factors: tuple[float, ...] = network_flag(
        (), "longrope: frequency divisors beyond the original context", above=0
    )

    @property
    def uses_rope(self) -> bool:
        return self.position_embedding_type == ROPE

    @property
    def original_context(self) -> int:
        """Context length in tokens before RoPE scaling."""
        return self.rope_original_max_positions or self.max_position_embeddings

    @property
    def short_context(self) -> int | None:
        """Text length beyond which all tokens are rotated differently (longrope); None without such a limit."""
        if not self.uses_rope or self.rope_scaling_type != "longrope":
            return None
        return self.original_context

    @property
    def rotations_fixed_up_to(self) -> int | None:
        """Text length beyond which rotations depend on the length (dynamic, longrope); None if they never do."""
        if not self.uses_rope or self.rope_scaling_type not in ("dynamic", "longrope"):
            return None
        return self.original_context

    def is_rotary_layer(self, layer: int) -> bool:
        pattern = self.rope_layer_pattern
        return self.uses_rope and (not pattern or bool(pattern[layer % len(pattern)]))
