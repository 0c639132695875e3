"""What the stored arguments of a fork say about training: flags of ours, and how far the run had come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.record import Progress
from megatron.convert.megatron_format.model import TrainingState

# Flags that mean the same there and here.
SAME_FLAGS = (
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_warmup_fraction",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
    "seed",
    "split",
    "eod_mask_loss",
    "reset_position_ids",
    "reset_attention_mask",
    "optimizer",
)
BY_SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples")
BY_STEPS = ("train_iters", "lr_decay_iters", "lr_warmup_iters")
_DECAYS = ("constant", "linear", "cosine")
_OPTIMIZERS = ("adam", "sgd")


def training_flags(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of the run by field, those that it stored and that we have."""
    counted = BY_SAMPLES if stored.get("train_samples") else BY_STEPS
    found = {
        name: stored[name]
        for name in (*SAME_FLAGS, *counted)
        if isinstance(stored.get(name), bool | int | float | str) and not (name in counted and not stored[name])
    }
    if found.get("lr_decay_style") not in _DECAYS:
        found.pop("lr_decay_style", None)
    if found.get("optimizer") not in _OPTIMIZERS:
        found.pop("optimizer", None)
    if found.get("lr_warmup_fraction") == 0:
        del found["lr_warmup_fraction"]
    ramp = stored.get("rampup_batch_size")
    if isinstance(ramp, list | tuple) and len(ramp) == 3:
        found["rampup_batch_size"] = [int(number) for number in ramp]
    for name in ("fp16", "bf16"):
        if stored.get(name):
            found[name] = True
    return found


def training_state(
    content: Mapping[str, Any],
    stored: Mapping[str, Any],
    updates: int | None = None,
    loss_scale: Mapping[str, float] | None = None,
) -> TrainingState:
    """How far the run had come.

    Args:
        content: the file that holds iteration and tokens.
        stored: its arguments.
        updates: updates that the optimizer counted; None where it counts none.
    """
    step = _count(content.get("iteration", content.get("total_iters", content.get("global_steps"))))
    samples = _count(stored.get("consumed_train_samples"))
    if not samples and step:
        samples = step * _count(stored.get("global_batch_size"))
    tokens = _count(content.get("tokens")) or samples * _count(stored.get("seq_length"))
    skipped = _count(content.get("skipped_steps"))
    progress = Progress(step, samples, tokens, skipped)
    return TrainingState(
        progress=progress,
        updates=max(0, step - skipped) if updates is None else updates,
        loss_scale=loss_scale or {} if stored.get("fp16") else {},
        flags=training_flags(stored),
    )


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0
