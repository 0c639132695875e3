"""`--deepspeed_config FILE`: settings that a flag governs are taken from the file; a flag that was given must agree.

The sections `optimizer` and `scheduler` become values of the trainer's flags. DeepSpeed itself applies them only where
a program hands it neither an optimizer nor a schedule. Like the trainer's, its schedules count steps, rise from 0, and
then hold or fall; schedules that differ in more than the step they begin with are refused.

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

# A section that says `"enabled": false` is not compared with flags, nor is anything else in it.
_SWITCHES = frozenset({"fp16", "bf16", "bfloat16", "curriculum_learning"})
OFFLOADED_WEIGHTS = ("offload_param", "cpu_offload_param")  # DeepSpeed reads them at ZeRO stage 3 only
_DYNAMIC = ("fp16", "loss_scale")
_OPTIMIZER = "optimizer."  # Megatron-DeepSpeed hands DeepSpeed an optimizer made of its flags, whatever a file says


def read_settings(path: str) -> dict[str, Any]:
    """The settings of a DeepSpeed file that have an effect.

    Raises:
        ConfigError: it cannot be read, or an entry is unknown, of the wrong type, out of range or refused.
    """
    checked = _checked(path)
    if checked.problems:
        raise ConfigError(checked.problems)
    return checked.settings


def offloaded_ratio(zero: Mapping[str, Any]) -> float:
    """The share of the optimizer's state that is to be offloaded, of a `zero_optimization` section."""
    return float((zero.get("offload_optimizer") or {}).get("ratio", 1.0))


def _checked(path: str) -> CheckedSettings:
    name = f"--deepspeed_config {path}"
    tree = read_json(path, name)
    if not isinstance(tree, dict):
        raise ConfigError(f"{name} holds a {type(tree).__name__}. It must hold one JSON object.")
    return check_settings(tree, name)


@dataclass
class ParsedDeepSpeedFile:
    """The values that a DeepSpeed file sets, and what is wrong with it."""

    values: dict[str, Any] = field(default_factory=dict)  # destination -> value
    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # fields whose entry could not be read
    notices: list[str] = field(default_factory=list)
    overruled: set[str] = field(default_factory=set)  # destinations whose given value does not count

    def take(self, path: str, flag: Flag, given: Mapping[str, Any], said: tuple[str, Any, str, Any]) -> None:
        """Takes a value of the file, or notes that a given one differs.

        Args:
            said: the key in the file, what it says, the destination, and the value for it.
        """
        key, entry, destination, value = said
        if destination not in given:
            if value is not None:
                self.values[destination] = value
            return
        asked = given[destination]
        there = f'--deepspeed_config {path}: "{key}" is {json.dumps(entry)} there'
        if asked == value:
            return
        if value is False and key.partition(".")[0] in _SWITCHES:
            self.notices.append(f"{there}, and {flag.positive_name} was given: the flag is used.")
        elif key.startswith(_OPTIMIZER):
            self.notices.append(
                f"{there}, and {flag.positive_name} {asked} was given: the flag is used, as in upstream."
            )
        else:
            self.problems.append(f"{there}, and {flag.positive_name} is {asked}. Make them equal or drop one of them.")


def governed_values(
    path: str, flags: Mapping[str, Flag], given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> ParsedDeepSpeedFile:
    """Reads what a DeepSpeed file says about fields that were not given.

    Args:
        path: the file.
        flags: destination ("section.field") -> flag.
        given: destination -> value of the command line or of `--config`.
        defaults: destination -> value that the program prefers to the flag's default.

    Returns:
        The values by destination, with one sentence for each entry that disagrees with a given value, cannot be used
        or is unknown, and a notice for each that has no effect.
    """
    try:
        checked = _checked(path)
    except ConfigError as failure:
        return ParsedDeepSpeedFile(problems=failure.problems)
    reading = ParsedDeepSpeedFile(problems=checked.problems, notices=checked.notices)
    destinations = {flag.positive_name: destination for destination, flag in flags.items()}
    for place, name in governing_flags().items():
        destination, entry = destinations[name], _lookup(checked.settings, place)
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
                f"{flag.positive_name} {given[destination]} is not used, as in upstream."
            )
            continue
        is_off = place == ("fp16", "enabled") and value is False
        if is_off and given.get(destination) and _trains_in_bf16(checked.settings, given):
            reading.overruled.add(destination)
            reading.notices.append(
                f'--deepspeed_config {path}: "fp16.enabled" is false and "bf16.enabled" is true there, so the run '
                "trains in bfloat16: --fp16 is not used, as in upstream."
            )
            continue
        if place[0] == "scheduler" and reading.values.get(destination, value) != value:
            reading.notices.append(
                f'--deepspeed_config {path}: "{key}" is {json.dumps(entry)} there, which is used: a schedule replaces '
                "the learning rate of the optimizer."
            )
        reading.take(path, flag, given, (key, entry, destination, value))
    stage = {**defaults, **reading.values, **given}.get("parallel.zero_stage", flags["parallel.zero_stage"].default)
    reading.notices += _offload_notices(path, checked.settings.get("zero_optimization", {}), stage)
    peak = {**defaults, **given, **reading.values}.get("optim.lr")
    further = training_settings(checked.settings, checked.tree, peak)
    reading.problems += [f"--deepspeed_config {path}: {problem}" for problem in further.problems]
    for each in further.entries:
        reading.take(path, flags[each[2]], given, each)
    return reading


def _offload_notices(path: str, zero: Mapping[str, Any], stage: int) -> Iterator[str]:
    if stage < 3 and (zero.get("cpu_offload_param") or zero.get("offload_param", {}).get("device", "none") != "none"):
        yield (
            f'--deepspeed_config {path}: "zero_optimization.offload_param" has no effect with ZeRO stage {stage}, as '
            "in DeepSpeed: the weights stay on the device. Use --zero-stage 3 to keep them on the host."
        )


def _trains_in_bf16(settings: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether the file asks for bfloat16 and no flag says otherwise; DeepSpeed then casts the network to it.

    Source: DeepSpeed `runtime/engine.py`, `_configure_distributed_model`.
    """
    is_asked = any(_lookup(settings, (section, "enabled")) for section in ("bf16", "bfloat16"))
    return is_asked and "precision.bf16" not in given


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
    """What the two sections say.

    Attributes:
        entries: (key in the file, what it says, destination "section.field", value).
        problems: what is missing or cannot be represented, one sentence each, without the name of the file.
    """

    entries: list[tuple[str, Any, str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def training_settings(settings: Mapping[str, Any], tree: Mapping[str, Any], peak: float | None) -> TrainingSettings:
    """The values of flags that follow from the sections `optimizer` and `scheduler`, except the values that are the
    same number in the file and in a flag.

    Args:
        settings: the checked entries of the file.
        tree: the file as written, with the entries that are "auto".
        peak: the peak learning rate, if it is known: a schedule names its floor as a share of it.
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
        if "type" not in section:  # a wrong one is refused already
            training.problems.append(f'"scheduler" has no "type". Give one of {", ".join(_STYLES)}, or remove it.')
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
    """What the schedule lacks, or has that the trainer's does not support."""
    if params.get("warmup_type") != "linear":
        yield (
            f'"scheduler.params.warmup_type" must be linear, not {params.get("warmup_type", "log")} (the '
            "default of DeepSpeed): the learning rate rises in proportion to the steps here. Set it to linear, or "
            "remove the section and give --lr-warmup-iters."
        )
    if kind != "WarmupLR" and given.get("total_num_steps") is None:
        yield f'"scheduler.params.total_num_steps" is missing, which {kind} needs: the step that the decay ends with.'
    unused = {"WarmupLR": ("total_num_steps", "cos_min_ratio"), "WarmupDecayLR": ("cos_min_ratio",)}
    for name in (*unused.get(kind, ("warmup_max_lr",)),):
        if name in params:
            yield f'"scheduler.params.{name}" is not a parameter of {kind}. Remove it, or use another type.'
