"""How the network knows the order of tokens: learned vectors, rotation of queries and keys, or a bias on the scores."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import network_flag
from megatron.config.flags.section import ConfigSection
from megatron.errors import ConfigError

LEARNED, ROPE, ALIBI, NO_POSITIONS = "learned_absolute", "rope", "alibi", "none"


def _needed_positions(model: PositionFields) -> int:
    """Always an error here: the sequence length is in another section, and `parse` fills it in where it is enough."""
    raise ConfigError(
        "--max-position-embeddings is required: rows of the learned position embedding, at least the sequence length."
    )


@dataclass(frozen=True)
class PositionFields(ConfigSection):
    """Kind of positions, and the frequencies of rotary ones.

    Source of the scalings: transformers, `modeling_rope_utils.py`; YaRN: Peng et al., 2023.
    """

    max_position_embeddings: int = network_flag(
        help="rows of the learned position embedding, at least the sequence length; with other positions the context "
        "the network is made for, --seq-length if unset",
        computed=_needed_positions,
        spelled=("--max-absolute-position-embeddings",),
        at_least=1,
        at_most=2**31 - 1,
    )
    position_embedding_type: str = network_flag(
        LEARNED,
        "how tokens are positioned",
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
    rotary_percent: float = network_flag(1.0, "share of each head's width that is rotated", above=0, at_most=1)
    rotary_base: float = network_flag(
        10000.0,
        "base of the rotation frequencies",
        at_least=1,
        spelled=("--rotary-position-embeddings-theta", "--rope-theta"),
    )
    rotary_interleaved: bool = network_flag(False, "rotate neighbouring channels instead of the two halves of a head")
    rotary_base_windowed: float | None = network_flag(
        None, "base of the unscaled frequencies in layers with a sliding window", at_least=1
    )
    rope_layer_pattern: tuple[int, ...] = network_flag(
        (), "1 for layers that rotate, 0 for layers without positions, repeated over the layers", choices=(0, 1)
    )
    rope_scaling_type: str = network_flag(
        "none",
        "how the rotation frequencies are stretched for longer contexts",
        choices=("none", "linear", "dynamic", "llama3", "yarn", "longrope"),
    )
    rope_scaling_factor: float = network_flag(
        8.0, "factor of the stretched context", at_least=1, spelled=("--rotary-scaling-factor",)
    )
    rope_original_max_positions: int | None = network_flag(
        None,
        "context that the unscaled network was trained with; --max-position-embeddings if unset",
        at_least=1,
        spelled=("--yarn-original-max-position-embeddings",),
    )
    rope_low_freq_factor: float = network_flag(1.0, "llama3: below this, frequencies are divided", above=0)
    rope_high_freq_factor: float = network_flag(4.0, "llama3: above this, frequencies are unchanged", above=0)
    rope_beta_fast: float = network_flag(
        32.0, "yarn: rotations above which frequencies are unchanged", above=0, spelled=("--yarn-beta-fast",)
    )
    rope_beta_slow: float = network_flag(
        1.0, "yarn: rotations below which frequencies are divided", above=0, spelled=("--yarn-beta-slow",)
    )
    yarn_correction_range_round_to_int: bool = network_flag(
        True, "yarn: the channels between which frequencies are interpolated are whole numbers"
    )
    rope_attention_factor: float | None = network_flag(
        None, "yarn and longrope: factor of cosine and sine; from the context lengths if unset", above=0)  # fmt: skip
    rope_short_factors: tuple[float, ...] = network_flag((), "longrope: divisors up to the original context", above=0)
    rope_long_factors: tuple[float, ...] = network_flag((), "longrope: divisors beyond it", above=0)

    @property
    def uses_rope(self) -> bool:
        """Whether queries and keys are rotated."""
        return self.position_embedding_type == ROPE

    @property
    def original_context(self) -> int:
        """Tokens of the context that the scalings of the rotation frequencies start from."""
        return self.rope_original_max_positions or self.max_position_embeddings

    @property
    def short_context(self) -> int | None:
        """Length of a text beyond which all its tokens are rotated differently (longrope); None if there is none."""
        if not self.uses_rope or self.rope_scaling_type != "longrope":
            return None
        return self.original_context

    @property
    def rotations_fixed_up_to(self) -> int | None:
        """Length of a text beyond which its rotations depend on how long it is (dynamic, longrope); None if they never
        do.
        """
        if not self.uses_rope or self.rope_scaling_type not in ("dynamic", "longrope"):
            return None
        return self.original_context

    def is_rotary_layer(self, layer: int) -> bool:
        """Whether block `layer` rotates its queries and keys."""
        pattern = self.rope_layer_pattern
        return self.uses_rope and (not pattern or bool(pattern[layer % len(pattern)]))
