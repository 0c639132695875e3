"""The sections `optimizer` and `scheduler` of a DeepSpeed file, as values of the trainer's flags.

DeepSpeed itself applies them only where a program hands it neither an optimizer nor a schedule. Like the trainer's, its
schedules count steps, rise from 0, and then hold or fall; schedules that differ in more than the step they begin with
are refused.

Source: DeepSpeed 0.19 `runtime/lr_schedules.py`, `WarmupLR`, `WarmupDecayLR` and `WarmupCosineLR`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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
        tree: the file as it is, with the entries that are "auto".
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
    """What the schedule lacks, or what the trainer's has not."""
    if params.get("warmup_type") != "linear":
        yield (
            f'"scheduler.params.warmup_type" must be linear, not {params.get("warmup_type", "log")} (which DeepSpeed '
            "takes if it is left out): the learning rate rises in proportion to the steps here. Set it to linear, or "
            "remove the section and give --lr-warmup-iters."
        )
    if kind != "WarmupLR" and given.get("total_num_steps") is None:
        yield f'"scheduler.params.total_num_steps" is missing, which {kind} needs: the step that the decay ends with.'
    unused = {"WarmupLR": ("total_num_steps", "cos_min_ratio"), "WarmupDecayLR": ("cos_min_ratio",)}
    for name in (*unused.get(kind, ("warmup_max_lr",)),):
        if name in params:
            yield f'"scheduler.params.{name}" is not a parameter of {kind}. Remove it, or use another type.'
