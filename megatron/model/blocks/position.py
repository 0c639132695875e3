"""Rotary positions and the linear biases of ALiBi."""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron.config import ModelConfig
from megatron.kernels.choice import Implementation
from megatron.kernels.rotary import doubled, rotate_both, rotate_few
from megatron.model.interface.step_context import StepContext

Rotation = tuple[torch.Tensor, torch.Tensor]


class Rotary:
    """The rotary position encoding of one layer's queries and keys."""

    def __init__(self, config: ModelConfig, layer: int, implementation: Implementation) -> None:
        self.config = config
        self.options: dict[str, Any] = {"interleaved": config.rotary_interleaved, "implementation": implementation}
        self.windowed = config.rotary_base_windowed is not None and config.window_of(layer) is not None
        self.rotates_whole_halves = not config.rotary_interleaved and config.rotary_width == config.kv_channels

    def angles(self, context: StepContext, length: int) -> Rotation:
        """Cosines and sines of the angles of a micro-batch's tokens, computed once for all layers that share them.

        Shapes: both `[b or 1, 1, s, r/2]` float32, r the rotated width of a head.

        Args:
            length: tokens of the micro-batch.
        """
        device = context.sample_ids.device

        def compute() -> Rotation:
            frequencies, factor = _frequencies(self.config, context, length, self.windowed)
            positions = context.position_ids if context.position_ids is not None else context.positions(length)
            if positions is None:
                first = context.position_offset
                positions = torch.arange(first, first + length, device=device).unsqueeze(0)
            angles = positions.view(-1, length).float().unsqueeze(-1) * frequencies  # [b or 1, s, r/2]
            return (angles.cos() * factor).unsqueeze(1), (angles.sin() * factor).unsqueeze(1)

        return context.once(("rotation", self.windowed, length), compute)

    def rotate(self, query: torch.Tensor, key: torch.Tensor, context: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates queries and keys. Shapes: `[b, a/t, s, d]` and `[b, g/t, s, d]` to the same."""
        length = query.shape[2]
        if self.rotates_whole_halves and context.caches is not None and not torch.is_grad_enabled():
            name = ("whole rotation", self.windowed, length)
            angles = context.once(name, lambda: doubled(*self.angles(context, length)))
            rotated = rotate_few(torch.cat((query, key), dim=1), *angles)  # faster for few tokens
            return rotated.split((query.shape[1], key.shape[1]), dim=1)  # type: ignore[return-value]
        return rotate_both(query, key, *self.angles(context, length), **self.options)


def _frequencies(config: ModelConfig, context: StepContext, length: int, windowed: bool) -> tuple[torch.Tensor, float]:
    """The frequencies of a micro-batch on its device; per token if texts are mixed and frequencies depend on lengths.

    They are computed on the host, so that they are bitwise equal everywhere, and copied once for all micro-batches.

    Shapes: `[r/2]` or `[s, r/2]` float32.
    """
    device = context.sample_ids.device

    def on_device(length: int) -> tuple[torch.Tensor, float]:
        frequencies, factor = rotary_frequencies(config, length, windowed=windowed)
        return frequencies.to(device), factor

    fixed_up_to = config.rotations_fixed_up_to
    if not context.texts or fixed_up_to is None:
        needed = context.positions_needed(length)
        longest = None if fixed_up_to is None else max(needed, fixed_up_to)
        return context.once_for_all(("frequencies", config, windowed, longest, device), lambda: on_device(needed))
    by_text = [rotary_frequencies(config, part.text_length, windowed=windowed) for part in context.texts]
    rows = [row.expand(part.count, -1) for part, (row, _) in zip(context.texts, by_text, strict=True)]
    return torch.cat(rows).to(device), by_text[0][1]


def rotary_frequencies(config: ModelConfig, length: int, *, windowed: bool = False) -> tuple[torch.Tensor, float]:
    """The rotation frequencies per channel pair, in radians per position, and the factor of cosine and sine.

    Everything is computed in float32 and in the order of transformers' implementation: another order would change the
    angles at long positions.

    Shapes: `[r/2]` float32.

    Args:
        length: length of the sequence, for the scalings that depend on it.
        windowed: True for layers with a sliding window, which have their own base (`rotary_base_windowed`) and no
            scaling.

    Source: Su et al., "RoFormer", 2021, equation 15; the scalings: transformers `modeling_rope_utils.py`.
    """
    width = config.rotary_width
    base = config.rotary_base
    if windowed and config.rotary_base_windowed is not None:
        return _plain_frequencies(config.rotary_base_windowed, width), 1.0
    kind, factor = config.rope_scaling_type, config.rope_scaling_factor
    if kind == "linear":
        return _plain_frequencies(base, width) / factor, 1.0
    if kind == "dynamic" and width > 2:  # the one frequency of two channels is 1, whatever the base
        context = config.original_context
        ratio = factor * max(length, context) / context - (factor - 1)
        return _plain_frequencies(base * ratio ** (width / (width - 2)), width), 1.0
    if kind == "llama3":
        return _llama3_frequencies(config, width), 1.0
    if kind == "yarn":
        return _yarn_frequencies(config, width), config.rope_attention_factor or config.yarn_factor
    if kind == "longrope":
        return _longrope_frequencies(config, width, length), _longrope_factor(config)
    return _plain_frequencies(base, width), 1.0


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head's linear bias.

    Source: Press et al., "Train short, test long", 2022, section 3; if the number is no power of two, as in the
    authors' code: the slopes of the next lower power, then every other slope of the next higher one.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    slopes += [2.0 ** (-8.0 * (2 * head + 1) / (2 * power)) for head in range(heads - power)]
    return slopes


def _plain_frequencies(base: float, width: int) -> torch.Tensor:
    return 1.0 / _periods(base, width)


def _periods(base: float, width: int) -> torch.Tensor:
    """Positions per radian of every channel pair."""
    return base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def _llama3_frequencies(config: ModelConfig, width: int) -> torch.Tensor:
    """Divides low frequencies, keeps high ones, and interpolates between them.

    Source: Llama 3.1 reference code, as in transformers `modeling_rope_utils.py`.
    """
    frequencies = _plain_frequencies(config.rotary_base, width)
    low, high, factor = config.rope_low_freq_factor, config.rope_high_freq_factor, config.rope_scaling_factor
    original = config.original_context
    wavelength = 2 * math.pi / frequencies
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * (frequencies / factor) + smooth * frequencies
    divided = torch.where(wavelength > original / low, frequencies / factor, frequencies)
    is_between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(is_between, blended, divided)


def _yarn_frequencies(config: ModelConfig, width: int) -> torch.Tensor:
    """Source: Peng et al., "YaRN", 2023, section 3.2; without rounding: gpt-oss, as in transformers."""
    base, original = config.rotary_base, config.original_context

    def channel(rotations: float) -> float:
        """The index of the channel pair that makes this many rotations over the original context."""
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = channel(config.rope_beta_fast), channel(config.rope_beta_slow)
    if config.yarn_correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    length = high - low if high > low else 0.001
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / length).clamp(0, 1)
    periods = _periods(base, width)
    kept = 1 - ramp
    return 1.0 / (config.rope_scaling_factor * periods) * (1 - kept) + 1.0 / periods * kept


def _longrope_frequencies(config: ModelConfig, width: int, length: int) -> torch.Tensor:
    """Source: Ding et al., "LongRoPE", 2024; the list of factors depends on the current length, as in Phi-3's code."""
    is_long = length > config.original_context
    divisors = torch.tensor(config.rope_long_factors if is_long else config.rope_short_factors, dtype=torch.float32)
    return 1.0 / (divisors * _periods(config.rotary_base, width))


def _longrope_factor(config: ModelConfig) -> float:
    if config.rope_attention_factor is not None:
        return config.rope_attention_factor
    original = config.original_context
    ratio = config.max_position_embeddings / original
    return 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
