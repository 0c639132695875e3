"""Fields that differ from layer to layer: which blocks have a sliding window.

Both count the tokens of a window with the token itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config import ModelConfig
from megatron.convert.hugging_face.table.config_fields import Entries, FieldRule

WINDOWED, FULL = "sliding_attention", "full_attention"


def window_of_all_layers(default: int | None = None) -> FieldRule:
    """The rule of families in which all blocks have the window `sliding_window`, or none has.

    Args:
        default: the family's window where the file does not have the field; null always means none.
    """

    def read(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
        given = entries.take("sliding_window", None)
        if given is None and not entries.is_null("sliding_window"):
            given = default
        return {"attention_window": checked_window(entries, given)}

    return FieldRule(read, _write_one_window)


def switched_window(by_layer: bool = True) -> FieldRule:
    """The rule of the Qwen families: `sliding_window` counts only with `use_sliding_window`.

    Args:
        by_layer: whether it begins at the block `max_window_layers`; otherwise all blocks have it.
    """

    def read(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
        first = entries.take("max_window_layers", 28)
        layers = fields["num_layers"]
        pattern = read_layer_types(entries, layers) if by_layer else None
        if pattern is None:
            pattern = tuple(int(not by_layer or layer >= first) for layer in range(layers))
        window = entries.take("sliding_window", 4096)
        if not entries.take("use_sliding_window", False):
            if by_layer and entries.has("layer_types") and any(pattern):
                raise entries.refused("layer_types", WINDOWED, 'contradicts "use_sliding_window": false')
            return {"attention_window": None}
        return windows(checked_window(entries, window), pattern)

    def write(model: ModelConfig) -> dict[str, Any]:
        pattern = pattern_of(model)
        written: dict[str, Any] = {"use_sliding_window": any(pattern), "sliding_window": model.attention_window}
        if by_layer:
            first = pattern.index(1) if any(pattern) else model.num_layers
            written |= {"max_window_layers": first, "layer_types": layer_types(pattern)}
        return written

    return FieldRule(read, write)


def read_layer_types(entries: Entries, layers: int) -> tuple[int, ...] | None:
    """The list `layer_types` as 1 for blocks with a window and 0 for others; None if there is no list.

    Raises:
        ConversionError: it has another length, or a kind of block that cannot be expressed.
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


def windows(window: int | None, pattern: Sequence[int]) -> dict[str, Any]:
    """Our fields of windows, from the blocks that have one."""
    if window is None or not any(pattern):
        return {"attention_window": None}
    return {"attention_window": window, "attention_window_pattern": () if all(pattern) else shortest(pattern)}


def pattern_of(model: ModelConfig) -> tuple[int, ...]:
    """1 for blocks with a window, 0 for others."""
    return tuple(int(model.window_of(layer) is not None) for layer in range(model.num_layers))


def layer_types(pattern: Sequence[int]) -> list[str]:
    """The list `layer_types`."""
    return [WINDOWED if windowed else FULL for windowed in pattern]


def shortest(pattern: Sequence[int]) -> tuple[int, ...]:
    """The shortest pattern that gives the same when it is repeated."""
    for length in range(1, len(pattern)):
        if all(value == pattern[layer % length] for layer, value in enumerate(pattern)):
            return tuple(pattern[:length])
    return tuple(pattern)


def checked_window(entries: Entries, window: Any) -> int | None:
    """A window in tokens, or None.

    Raises:
        ConversionError: it is not a positive integer.
    """
    if window is not None and (type(window) is not int or window < 1):
        raise entries.refused("sliding_window", window, "should be a number of tokens")
    return window


def _write_one_window(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": model.attention_window if all(pattern_of(model)) else None}
