"""`--deepspeed_config FILE`: the settings a flag governs are taken from it, unless the flag was given and disagrees."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.files.deepspeed_keys import unknown_keys
from megatron.config.flags.command_line import value_from_file
from megatron.config.flags.fields import Flag
from megatron.errors import ConfigError

# The settings of a DeepSpeed file that flags govern: path in the file -> "section.field".
GOVERNED: Mapping[tuple[str, ...], str] = types.MappingProxyType(
    {
        ("train_micro_batch_size_per_gpu",): "optim.micro_batch_size",
        ("train_batch_size",): "optim.global_batch_size",
        ("gradient_clipping",): "optim.clip_grad",
        ("zero_optimization", "stage"): "parallel.zero_stage",
        ("fp16", "enabled"): "precision.fp16",
        ("bf16", "enabled"): "precision.bf16",
        ("bfloat16", "enabled"): "precision.bf16",
        ("fp16", "loss_scale"): "precision.loss_scale",
        ("fp16", "initial_scale_power"): "precision.initial_loss_scale",
        ("fp16", "loss_scale_window"): "precision.loss_scale_window",
        ("fp16", "min_loss_scale"): "precision.min_loss_scale",
        ("fp16", "hysteresis"): "precision.hysteresis",
    }
)


def read_deepspeed_file(path: str) -> dict[str, Any]:
    """Reads a DeepSpeed settings file.

    Raises:
        ConfigError: it cannot be read, is not JSON, or holds no object.
    """
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as failure:
        reason = failure.strerror
        raise ConfigError(f"--deepspeed_config {path} cannot be read: {reason}. Give a readable JSON file.") from None
    except (ValueError, RecursionError) as failure:
        raise ConfigError(f"--deepspeed_config {path} is not JSON: {failure}. Fix the file.") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"--deepspeed_config {path} holds a {type(tree).__name__}. It must hold one JSON object.")
    return tree


@dataclass
class DeepSpeedReading:
    """What a DeepSpeed file says about fields that were not given, and what is wrong with it."""

    values: dict[str, Any] = field(default_factory=dict)  # destination -> value
    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # fields whose entry could not be read
    notices: list[str] = field(default_factory=list)


def governed_values(path: str, flags: Mapping[str, Flag], given: Mapping[str, Any]) -> DeepSpeedReading:
    """Reads what a DeepSpeed file says about fields that were not given.

    Args:
        path: the file.
        flags: destination ("section.field") -> flag.
        given: destination -> value of the command line or of `--config`.

    Returns:
        The values by destination, with one sentence for each entry that disagrees with a given value, is of the wrong
        type or has a misspelt key, and a notice for each unknown key.
    """
    try:
        tree = read_deepspeed_file(path)
    except ConfigError as failure:
        return DeepSpeedReading(problems=failure.problems)
    reading = DeepSpeedReading()
    for key, meant in unknown_keys(tree):
        if meant is not None:
            reading.problems.append(f'--deepspeed_config {path}: "{key}" is not known. Did you mean "{meant}"?')
        else:
            reading.notices.append(
                f'--deepspeed_config {path}: "{key}" is not a known key; it is passed on to DeepSpeed unchanged.'
            )
    for place, destination in GOVERNED.items():
        entry = _lookup(tree, place)
        if entry is None or entry == "auto":
            continue
        flag, key = flags[destination], ".".join(place)
        try:
            value = _as_flag_value(flag, place, entry)
        except ConfigError as failure:
            reading.problems.append(f'--deepspeed_config {path}: "{key}" {failure}.')
            reading.broken.add(flag.field)
            continue
        if destination in given and given[destination] != value:
            reading.problems.append(
                f'--deepspeed_config {path}: "{key}" is {json.dumps(entry)} there, and {flag.positive_name} is '
                f"{given[destination]}. Make them equal or drop one of them."
            )
        elif destination not in given and value is not None:
            reading.values[destination] = value
    return reading


def _as_flag_value(flag: Flag, place: tuple[str, ...], entry: Any) -> Any:
    value = value_from_file(flag, entry)
    if place[-1] == "initial_scale_power":
        return 2.0**value
    if place[-1] == "loss_scale" and value == 0:
        return None  # DeepSpeed's notation for dynamic
    return value


def _lookup(tree: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        if not isinstance(tree, Mapping) or key not in tree:
            return None
        tree = tree[key]
    return tree
