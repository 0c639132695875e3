"""Fields of the architecture that have no effect because of another field, and why."""

from __future__ import annotations

import types
from collections.abc import Mapping

from megatron.config.flags.fields import flags_of
from megatron.config.sections.model import ModelRequest

# The scalings of the rotation frequencies that read a field.
_SCALINGS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "rope_scaling_factor": ("linear", "dynamic", "llama3", "yarn"),
        "rope_original_max_positions": ("dynamic", "llama3", "yarn", "longrope"),
        "rope_low_freq_factor": ("llama3",),
        "rope_high_freq_factor": ("llama3",),
        "rope_beta_fast": ("yarn",),
        "rope_beta_slow": ("yarn",),
        "rope_attention_factor": ("yarn", "longrope"),
        "rope_short_factors": ("longrope",),
        "rope_long_factors": ("longrope",),
    }
)


def idle_fields(model: ModelRequest) -> dict[str, str]:
    """The fields that change nothing in this network, each with what they would need."""
    names = [flag.field for flag in flags_of(ModelRequest)]
    idle: dict[str, str] = {}
    if not model.uses_rope:
        rotary = [name for name in names if name.startswith(("rotary_", "rope_"))]
        idle.update(dict.fromkeys(rotary, "rotary positions (--position-embedding-type rope)"))
    for name, kinds in _SCALINGS.items():
        if model.rope_scaling_type not in kinds:
            idle.setdefault(name, f"--rope-scaling-type {' or '.join(kinds)}")
    if model.attention_window is None:
        idle.setdefault("rotary_base_windowed", "--attention-window")
    if not model.qk_layernorm:
        idle["qk_layernorm_scope"] = "--qk-layernorm"
    if model.num_experts == 1:
        idle.update({name: "--num-experts" for name in names if name.startswith("moe_")})
    if not model.activation_function.startswith("gelu"):
        idle["openai_gelu"] = "a GELU (--activation-function)"
    return idle
