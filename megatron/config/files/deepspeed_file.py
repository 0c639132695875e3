"""`--deepspeed_config FILE`: settings that correspond to a flag set it; a flag on the command line must agree.

The sections `optimizer` and `scheduler` set the trainer's flags. DeepSpeed itself applies them only if the program
passes neither an optimizer nor a schedule. Like the trainer's, its schedules count steps, rise from 0, and then hold or
decay; they may start with another step, but other differences are refused.

Source: DeepSpeed 0.19 `runtime/lr_schedules.py`, `WarmupLR`, `WarmupDecayLR` and `WarmupCosineLR`.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.files.deepspeed_keys import CheckedSettings, check_settings
from megatron.config.files.deepspeed_table import governing_flags
from megatron.config.flags.command_line import value_from_file
from megatron.config.flags.fields import Flag
from megatron.errors import ConfigError
from megatron.files.settings import read_json

# Nothing in a section with `"enabled": false` is compared with flags.
_SWITCHES = frozenset({"fp16", "bf16", "bfloat16", "curriculum_learning"})
OFFLOADED_WEIGHTS = ("offload_param", "cpu_offload_param")  # DeepSpeed reads them at ZeRO stage 3 only
_DYNAMIC = ("fp16", "loss_scale")
_OPTIMIZER = "optimizer."  # Megatron-DeepSpeed builds the optimizer from flags and ignores the file


def read_settings(path: str) -> dict[str, Any]:
    """Reads the settings of a DeepSpeed file that have an effect.

    Raises:
        ConfigError: the file cannot be read, or an entry is unknown, of the wrong type, out of range or refused.
    """
    checked = _checked(path)
    if checked.problems:
        raise ConfigError(checked.problems)
    return checked.settings


def offloaded_ratio(zero: Mapping[str, Any]) -> float:
    """The fraction of the optimizer state to offload, from a `zero_optimization` section."""
    return float((zero.get("offload_optimizer") or {}).get("ratio", 1.0))


def _checked(path: str) -> CheckedSettings:
    name = f"--deepspeed_config {path}"
    tree = read_json(path, name)
    if not isinstance(tree, dict):
        raise ConfigError(f"{name} must contain a JSON object, not {type(tree).__name__}.")
    return check_settings(tree, name)


@dataclass
class ParsedDeepSpeedFile:
    """The values that a DeepSpeed file sets, and its problems."""

    values: dict[str, Any] = field(default_factory=dict)  # destination -> value
    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # fields whose entry could not be read
    notices: list[str] = field(default_factory=list)
    overruled: set[str] = field(default_factory=set)  # destinations whose given value is ignored

    def add(self, path: str, flag: Flag, given: Mapping[str, Any], setting: tuple[str, Any, str, Any]) -> None:
        """Adds a value of the file, or a problem or notice if a given value differs.

        Args:
            setting: the key in the file, its entry, the destination, and the value for it.
        """
        key, entry, destination, value = setting
        if destination not in given:
            if value is not None:
                self.values[destination] = value
            return
        current = given[destination]
        if current == value:
            return
        difference = f'--deepspeed_config {path}: "{key}" is {json.dumps(entry)}'
        if value is False and key.partition(".")[0] in _SWITCHES:
            self.notices.append(f"{difference}, but {flag.positive_name} is set: the flag is used.")
        elif key.startswith(_OPTIMIZER):
            self.notices.append(
                f"{difference}, but {flag.positive_name} {current} is set: the flag is used, as in upstream."
            )
        else:
            self.problems.append(
                f"{difference}, but {flag.positive_name} is {current}. Make them equal or drop one of them."
            )


def governed_values(
    path: str, flags: Mapping[str, Flag], given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> ParsedDeepSpeedFile:
    """Reads the values of a DeepSpeed file for fields that were not given.

    Args:
        path: the file.
        flags: destination ("section.field") -> flag.
        given: destination -> value of the command line or of `--config`.
        defaults: destination -> the program's default.

    Returns:
        The values by destination, a problem for each entry that is unknown, invalid or differs from a given value, and
        a notice for each that has no effect.
    """
    try:
        checked = _checked(path)
    except ConfigError as failure:
        return ParsedDeepSpeedFile(problems=failure.problems)
    parsed = ParsedDeepSpeedFile(problems=checked.problems, notices=checked.notices)
    destinations = {flag.positive_name: destination for destination, flag in flags.items()}
    for key_path, name in governing_flags().items():
        destination, entry = destinations[name], _lookup(checked.settings, key_path)
        if entry is None:
            if _is_present(checked.settings, key_path):
                parsed.broken.add(flags[destination].field)
            continue
        flag, key = flags[destination], ".".join(key_path)
        value = _as_flag_value(flag, key_path, entry)
        if destination in given and key_path == _DYNAMIC and value is None:
            parsed.overruled.add(destination)
            parsed.notices.append(
                f'--deepspeed_config {path}: "{key}" is {json.dumps(entry)}, so the loss scale is dynamic: '
                f"{flag.positive_name} {given[destination]} is ignored, as in upstream."
            )
            continue
        is_off = key_path == ("fp16", "enabled") and value is False
        if is_off and given.get(destination) and _trains_in_bf16(checked.settings, given):
            parsed.overruled.add(destination)
            parsed.notices.append(
                f'--deepspeed_config {path}: "fp16.enabled" is false and "bf16.enabled" is true, so the run trains in '
                "bfloat16: --fp16 is ignored, as in upstream."
            )
            continue
        if key_path[0] == "scheduler" and parsed.values.get(destination, value) != value:
            parsed.notices.append(
                f'--deepspeed_config {path}: "{key}" is {json.dumps(entry)}, which is used: a schedule replaces the '
                "learning rate of the optimizer."
            )
        parsed.add(path, flag, given, (key, entry, destination, value))
    stage = {**defaults, **parsed.values, **given}.get("parallel.zero_stage", flags["parallel.zero_stage"].default)
    parsed.notices += _offload_notices(path, checked.settings.get("zero_optimization", {}), stage)
    peak = {**defaults, **given, **parsed.values}.get("optim.lr")
    training = training_settings(checked.settings, checked.tree, peak)
    parsed.problems += [f"--deepspeed_config {path}: {problem}" for problem in training.problems]
    for setting in training.entries:
        parsed.add(path, flags[setting[2]], given, setting)
    return parsed


def _offload_notices(path: str, zero: Mapping[str, Any], stage: int) -> Iterator[str]:
    if stage < 3 and (zero.get("cpu_offload_param") or zero.get("offload_param", {}).get("device", "none") != "none"):
        yield (
            f'--deepspeed_config {path}: "zero_optimization.offload_param" has no effect with ZeRO stage {stage}, as '
            "in DeepSpeed: the weights stay on the device. Use --zero-stage 3 to keep them on the host."
        )


def _trains_in_bf16(settings: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Returns True if the file enables bfloat16 and no flag overrides it; DeepSpeed then casts the network to it.

    Source: DeepSpeed `runtime/engine.py`, `_configure_distributed_model`.
    """
    is_enabled = any(_lookup(settings, (section, "enabled")) for section in ("bf16", "bfloat16"))
    return is_enabled and "precision.bf16" not in given


def _is_present(settings: Mapping[str, Any], key_path: tuple[str, ...]) -> bool:
    """Returns True if the entry exists, though its value could not be used."""
    section = _lookup(settings, key_path[:-1])
    return isinstance(section, Mapping) and key_path[-1] in section


def _as_flag_value(flag: Flag, key_path: tuple[str, ...], entry: Any) -> Any:
    value = value_from_file(flag, entry)
    if key_path[-1] == "initial_scale_power":
        return 2.0**value
    if key_path[-1] == "loss_scale" and value == 0:
        return None  # DeepSpeed's notation for dynamic
    return value


def _lookup(tree: Any, key_path: tuple[str, ...]) -> Any:
    for key in key_path:
        if not isinstance(tree, Mapping) or key not in tree:
            return None
        tree = tree[key]
    return tree


_STYLES: Mapping[str, str] = types.MappingProxyType(
    {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
)
_WARMUP_STEPS = 1000  # DeepSpeed's default
_COSINE_FLOOR = 0.0001  # DeepSpeed's default, as a share of the peak
_AUTO = "auto"
_ALWAYS: Mapping[str, str] = types.MappingProxyType(
    {
        "adam_w_mode": "the weight decay is decoupled from the gradient, as in AdamW",
        "bias_correction": "the moments are corrected for their start at 0",
    }
)


@dataclass
class TrainingSettings:
    """Flag values from the sections `optimizer` and `scheduler`.

    Attributes:
        entries: (key in the file, its entry, destination "section.field", value).
        problems: what is missing or cannot be represented, one sentence each, without the name of the file.
    """

    entries: list[tuple[str, Any, str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def training_settings(settings: Mapping[str, Any], tree: Mapping[str, Any], peak: float | None) -> TrainingSettings:
    """Converts the sections `optimizer` and `scheduler` to flags, except entries that `governing_flags` maps as they
    are.

    Args:
        settings: the checked entries of the file.
        tree: the file as written, including entries set to "auto".
        peak: the peak learning rate, if known: a schedule gives its minimum as a fraction of it.
    """
    training = TrainingSettings()
    optimizer = settings.get("optimizer", {})
    if optimizer.get("type") is not None:
        training.entries.append(("optimizer.type", optimizer["type"], "optim.optimizer", "adam"))
    for name, reason in _ALWAYS.items():
        if optimizer.get("params", {}).get(name) is False:
            training.problems.append(f'"optimizer.params.{name}" must be true: {reason}. Remove it from the file.')
    betas = optimizer.get("params", {}).get("betas")
    if betas is not None and len(betas) != 2:
        training.problems.append(f'"optimizer.params.betas" must be a list of 2 numbers, not {betas}.')
    elif betas is not None:
        for number, beta in enumerate(betas, 1):
            training.entries.append(("optimizer.params.betas", betas, f"optim.adam_beta{number}", beta))
    if settings.get("scheduler"):
        _add_schedule(training, settings["scheduler"], tree["scheduler"], peak)
    return training


def _add_schedule(
    training: TrainingSettings, section: Mapping[str, Any], tree: Mapping[str, Any], peak: float | None
) -> None:
    kind, params = section.get("type"), section.get("params", {})
    style = _STYLES.get(str(kind))
    if style is None:
        if "type" not in section:  # an invalid one is refused elsewhere
            training.problems.append(
                f'"scheduler" has no "type". Use one of {", ".join(_STYLES)}, or remove the section.'
            )
        return
    written = tree.get("params")
    given: Mapping[str, Any] = written if isinstance(written, Mapping) else {}
    training.problems += _schedule_problems(str(kind), params, given)
    training.entries.append(("scheduler.type", kind, "optim.lr_decay_style", style))
    if given.get("warmup_num_steps") != _AUTO:
        steps = params.get("warmup_num_steps", _WARMUP_STEPS)
        training.entries.append(("scheduler.params.warmup_num_steps", steps, "optim.lr_warmup_iters", steps))
    if params.get("total_num_steps") is not None and style != "constant":
        steps = params["total_num_steps"]
        training.entries.append(("scheduler.params.total_num_steps", steps, "optim.lr_decay_iters", steps))
    if style == "linear":
        training.entries.append(("scheduler.type", kind, "optim.min_lr", 0.0))
    elif style == "cosine" and given.get("cos_min_ratio") != _AUTO and peak is not None:
        ratio = params.get("cos_min_ratio", _COSINE_FLOOR)
        training.entries.append(("scheduler.params.cos_min_ratio", ratio, "optim.min_lr", ratio * peak))


def _schedule_problems(kind: str, params: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Missing entries of a schedule, and entries that the trainer does not support."""
    if params.get("warmup_type") != "linear":
        yield (
            f'"scheduler.params.warmup_type" must be linear, not {params.get("warmup_type", "log")} (DeepSpeed\'s '
            "default): only linear warmup is supported. Set it to linear, or remove the section and use "
            "--lr-warmup-iters."
        )
    if kind != "WarmupLR" and given.get("total_num_steps") is None:
        yield f'"scheduler.params.total_num_steps" is required by {kind}: the last step of the decay.'
    unused = {"WarmupLR": ("total_num_steps", "cos_min_ratio"), "WarmupDecayLR": ("cos_min_ratio",)}
    for name in (*unused.get(kind, ("warmup_max_lr",)),):
        if name in params:
            yield f'"scheduler.params.{name}" is not a parameter of {kind}. Remove it, or use another type.'
