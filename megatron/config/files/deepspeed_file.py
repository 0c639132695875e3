"""`--deepspeed_config FILE`: the settings a flag governs are taken from it, unless the flag was given and disagrees."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.files.bounded_file import read_json
from megatron.config.files.deepspeed_keys import CheckedSettings, check_settings
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
        ("curriculum_learning", "enabled"): "optim.curriculum_learning",
        ("curriculum_learning", "schedule_type"): "optim.curriculum_schedule",
        ("curriculum_learning", "min_difficulty"): "optim.curriculum_min_length",
        ("curriculum_learning", "max_difficulty"): "optim.curriculum_max_length",
        ("curriculum_learning", "schedule_config", "total_curriculum_step"): "optim.curriculum_steps",
        ("curriculum_learning", "schedule_config", "difficulty_step"): "optim.curriculum_length_step",
        ("curriculum_learning", "schedule_config", "root_degree"): "optim.curriculum_root_degree",
        ("curriculum_learning", "schedule_config", "difficulty"): "optim.curriculum_lengths",
        ("curriculum_learning", "schedule_config", "max_step"): "optim.curriculum_max_steps",
    }
)


# A section that says `"enabled": false` is not compared with flags, nor is anything else in it.
_SWITCHES = frozenset({"fp16", "bf16", "bfloat16", "curriculum_learning"})
_DYNAMIC = ("fp16", "loss_scale")


def read_settings(path: str) -> dict[str, Any]:
    """The settings of a DeepSpeed file that have an effect.

    Raises:
        ConfigError: it cannot be read, or an entry is unknown, of the wrong type, out of range or refused.
    """
    found = _checked(path)
    if found.problems:
        raise ConfigError(found.problems)
    return found.settings


def _checked(path: str) -> CheckedSettings:
    name = f"--deepspeed_config {path}"
    tree = read_json(path, name)
    if not isinstance(tree, dict):
        raise ConfigError(f"{name} holds a {type(tree).__name__}. It must hold one JSON object.")
    return check_settings(tree, name)


@dataclass
class DeepSpeedReading:
    """What a DeepSpeed file says about fields that were not given, and what is wrong with it."""

    values: dict[str, Any] = field(default_factory=dict)  # destination -> value
    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # fields whose entry could not be read
    notices: list[str] = field(default_factory=list)
    overruled: set[str] = field(default_factory=set)  # destinations whose given value the file replaces

    def applied(
        self, given: Mapping[str, Any], values: Mapping[str, Any], broken: set[str]
    ) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
        """The given values, all values, and the fields that could not be read, with what the file says."""
        given, values = (
            {name: found[name] for name in found if name not in self.overruled} for found in (given, values)
        )
        return dict(given), {**self.values, **values}, broken | self.broken


def governed_values(path: str, flags: Mapping[str, Flag], given: Mapping[str, Any]) -> DeepSpeedReading:
    """Reads what a DeepSpeed file says about fields that were not given.

    Args:
        path: the file.
        flags: destination ("section.field") -> flag.
        given: destination -> value of the command line or of `--config`.

    Returns:
        The values by destination, with one sentence for each entry that disagrees with a given value, cannot be used
        or is unknown, and a notice for each that has no effect.
    """
    try:
        checked = _checked(path)
    except ConfigError as failure:
        return DeepSpeedReading(problems=failure.problems)
    reading = DeepSpeedReading(problems=checked.problems, notices=checked.notices)
    for place, destination in GOVERNED.items():
        entry = _lookup(checked.settings, place)
        if entry is None:
            if _is_present(checked.settings, place):
                reading.broken.add(flags[destination].field)
            continue
        flag, key = flags[destination], ".".join(place)
        value = _as_flag_value(flag, place, entry)
        if destination in given and place == _DYNAMIC and value is None:
            reading.overruled.add(destination)
            reading.notices.append(
                f'--deepspeed_config {path}: "{key}" is {json.dumps(entry)} there, so the scale is dynamic: '
                f"{flag.positive_name} {given[destination]} is not used, as upstream."
            )
        elif destination in given and given[destination] != value:
            if value is False and place[0] in _SWITCHES:
                reading.notices.append(
                    f'--deepspeed_config {path}: "{key}" is false there, and {flag.positive_name} was given: the flag '
                    "is used."
                )
                continue
            reading.problems.append(
                f'--deepspeed_config {path}: "{key}" is {json.dumps(entry)} there, and {flag.positive_name} is '
                f"{given[destination]}. Make them equal or drop one of them."
            )
        elif destination not in given and value is not None:
            reading.values[destination] = value
    return reading


def _is_present(settings: Mapping[str, Any], place: tuple[str, ...]) -> bool:
    """Whether an entry is there whose value could not be used."""
    section = _lookup(settings, place[:-1])
    return isinstance(section, Mapping) and place[-1] in section


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
