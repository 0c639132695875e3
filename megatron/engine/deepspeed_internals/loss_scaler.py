"""DeepSpeed's loss scalers of fp16 (`runtime/fp16/loss_scaler.py`): their rule and counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.engine.gradients.loss_scale import LossScale, ScaleRule

# Attributes of the dynamic one that change from step to step.
SCALER_COUNTERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def counters_of(scaler: Any) -> dict[str, float]:
    """What changes of a scaler from step to step."""
    return {name: getattr(scaler, name) for name in SCALER_COUNTERS if hasattr(scaler, name)}


def restore_counters(scaler: Any, counters: Mapping[str, float]) -> None:
    """Sets what `counters_of` returned, and nothing else that a record may name."""
    for name in SCALER_COUNTERS:
        if name in counters:
            setattr(scaler, name, counters[name])


def loss_scale_of(scaler: Any, device: torch.device) -> LossScale:
    """A loss scale that goes on as a scaler of DeepSpeed would."""
    if not scaler.dynamic:
        return LossScale(scaler.cur_scale, None, device)
    rule = ScaleRule(scaler.scale_window, scaler.delayed_shift, scaler.min_scale, scaler.consecutive_hysteresis)
    return LossScale(scaler.cur_scale, rule, device)
