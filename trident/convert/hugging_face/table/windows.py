"""Rules for fields that differ between layers: sliding windows and their rotary embeddings.

Both programs count the token itself as part of the window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config import ModelConfig
from trident.convert.hugging_face.table.config_fields import Entries, FieldRule
from trident.convert.hugging_face.table.rope import read_parameters, write_parameters

WINDOWED, FULL = "sliding_attention", "full_attention"


def window_of_all_layers(default: int | None = None) -> FieldRule:
    """The rule of families whose blocks all have the window `sliding_window`, or none has.

    Args:
        default: the family's window if the field is missing; null means none.
    """

    def read(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"attention_window": _window(entries, None if entries.is_null("sliding_window") else default)}

    return FieldRule(
        read, lambda model: {"sliding_window": model.attention_window if all(_pattern_of(model)) else None}
    )


def switched_window(by_layer: bool = True) -> FieldRule:
    """The rule of the Qwen families: `sliding_window` requires `use_sliding_window`.

    Args:
        by_layer: only blocks from `max_window_layers` on have the window; otherwise all blocks.
    """

    def read(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
        first = entries.take("max_window_layers", 28)
        layers = fields["num_layers"]
        pattern = read_layer_types(entries, layers) if by_layer else None
        if pattern is None:
            pattern = tuple(int(not by_layer or layer >= first) for layer in range(layers))
        entries.skip("sliding_window")
        if not entries.take("use_sliding_window", False):
            if by_layer and entries.has("layer_types") and any(pattern):
                raise entries.refused("layer_types", WINDOWED, 'contradicts "use_sliding_window": false')
            return {"attention_window": None}
        return _windows(_window(entries, 4096), pattern)

    def write(model: ModelConfig) -> dict[str, Any]:
        pattern = _pattern_of(model)
        written: dict[str, Any] = {"use_sliding_window": any(pattern), "sliding_window": model.attention_window}
        if by_layer:
            first = pattern.index(1) if any(pattern) else model.num_layers
            written |= {"max_window_layers": first, "layer_types": _layer_types(pattern)}
        return written

    return FieldRule(read, write)


def layered_window(period: int, default: int = 4096) -> FieldRule:
    """The rule for windows in all layers except every `period`-th, unless the file has a list `layer_types`.

    Args:
        default: the family's window if the field is missing.
    """

    def read(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
        layers = fields["num_layers"]
        # Redundant if the file has the list.
        every = entries.take("sliding_window_pattern", entries.take("_sliding_window_pattern", period))
        pattern = read_layer_types(entries, layers)
        if pattern is None:
            if type(every) is not int or every < 1:
                raise entries.refused("sliding_window_pattern", every, "should be a number of layers")
            pattern = tuple(int((layer + 1) % every != 0) for layer in range(layers))
        if entries.is_null("sliding_window") and any(pattern):
            raise entries.refused("sliding_window", None, "should be a number of tokens")
        return _windows(_window(entries, default), pattern)

    def write(model: ModelConfig) -> dict[str, Any]:
        types = _layer_types(_pattern_of(model))
        return {"sliding_window": model.attention_window or default, "layer_types": types}

    return FieldRule(read, write)


def rotations_by_window(theta: float, windowed_theta: float | None = None, windowed_name: str = "") -> FieldRule:
    """The rule for rotary embeddings without scaling, and in some families with another base, in blocks with a window.

    Args:
        theta: default base of the other blocks.
        windowed_theta: default base of blocks with a window; None if the same.
        windowed_name: name of the latter in older files.
    """

    def read(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
        base = entries.take("rope_theta", theta)
        windowed_base = base if windowed_theta is None else windowed_theta
        if windowed_name:
            windowed_base = entries.take(windowed_name, windowed_base)
        by_kind = entries.inner("rope_parameters")
        full: dict[str, Any] = {}
        if by_kind is not None:
            full = dict(by_kind.take(FULL, {}))
            windowed = read_parameters({"rope_theta": windowed_base, **by_kind.take(WINDOWED, {})}, WINDOWED, fields)
            by_kind.check_all_read()
            if windowed["rope_scaling_type"] != "none":
                raise by_kind.refused(WINDOWED, windowed["rope_scaling_type"], "should not be scaled")
            windowed_base = windowed["rotary_base"]
        scaling = dict(entries.take("rope_scaling", {}))  # older form, for layers with full attention
        if "type" in scaling:
            scaling.setdefault("rope_type", scaling.pop("type"))
        return {
            "position_embedding_type": "rope",
            **read_parameters({"rope_theta": base, **full, **scaling}, "rope_parameters", fields),
            "rotary_base_windowed": float(windowed_base),
        }

    def write(model: ModelConfig) -> dict[str, Any]:
        full = write_parameters(model)
        windowed_base = model.rotary_base if model.rotary_base_windowed is None else model.rotary_base_windowed
        scaling = {key: value for key, value in full.items() if key != "rope_theta"}
        return {
            "rope_parameters": {FULL: full, WINDOWED: {"rope_type": "default", "rope_theta": windowed_base}},
            "rope_theta": model.rotary_base,
            **({windowed_name: windowed_base} if windowed_name else {}),
            "rope_scaling": None if full["rope_type"] == "default" else scaling,
        }

    return FieldRule(read, write)


def read_layer_types(entries: Entries, layers: int) -> tuple[int, ...] | None:
    """The list `layer_types` as 1 for blocks with a window and 0 for others; None if missing.

    Raises:
        ConversionError: it has another length or an unsupported kind of block.
    """
    kinds = entries.take("layer_types", None)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise entries.refused("layer_types", kinds, f"should be a list of {layers} kinds, one for each layer")
    for kind in kinds:
        if kind not in (WINDOWED, FULL):
            raise entries.refused("layer_types", kind, f"is supported only as {WINDOWED} or {FULL}")
    return tuple(int(kind == WINDOWED) for kind in kinds)


def shortest(pattern: Sequence[int]) -> tuple[int, ...]:
    """The shortest pattern whose repetition gives this one."""
    for length in range(1, len(pattern)):
        if all(value == pattern[layer % length] for layer, value in enumerate(pattern)):
            return tuple(pattern[:length])
    return tuple(pattern)


def _window(entries: Entries, default: int | None) -> int | None:
    return entries.positive("sliding_window", default, (int,), "a number of tokens")  # type: ignore[no-any-return]


def _windows(window: int | None, pattern: Sequence[int]) -> dict[str, Any]:
    if window is None or not any(pattern):
        return {"attention_window": None}
    return {"attention_window": window, "attention_window_pattern": () if all(pattern) else shortest(pattern)}


def _pattern_of(model: ModelConfig) -> tuple[int, ...]:
    return tuple(int(model.window_of(layer) is not None) for layer in range(model.num_layers))


def _layer_types(pattern: Sequence[int]) -> list[str]:
    return [WINDOWED if windowed else FULL for windowed in pattern]
