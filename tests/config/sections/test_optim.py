"""Optimizer, schedule and batch sizes, as requested and as resolved."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import OptimConfig, OptimRequest
from megatron.errors import ConfigError


def test_a_request_may_omit_what_a_run_requires() -> None:
    request = OptimRequest(micro_batch_size=2)
    assert (request.global_batch_size, request.train_iters, request.lr) == (None, None, None)
    with pytest.raises(TypeError, match="global_batch_size"):
        OptimConfig(micro_batch_size=2)


def test_a_run_may_plan_no_step_and_a_request_may_not() -> None:
    assert OptimConfig(micro_batch_size=2, global_batch_size=2, train_iters=0, lr=0.0).train_iters == 0
    with pytest.raises(ConfigError, match=r"--train-iters 0 is out of range.*--eval-only evaluates without training"):
        OptimRequest(micro_batch_size=2, train_iters=0)


def test_a_run_of_epochs_has_a_decay_in_samples() -> None:
    known: dict[str, Any] = {"micro_batch_size": 2, "lr_decay_style": "WSD"}
    assert OptimRequest(**known, lr_wsd_decay_samples=4).lr_wsd_decay_samples == 4
    with pytest.raises(ConfigError, match="--lr-wsd-decay-iters 4 cannot .* counted in samples"):
        OptimRequest(**known, lr_wsd_decay_iters=4)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"train_iters": 10, "lr_warmup_iters": 10}, "--lr-warmup-iters 10 is not less than --train-iters 10"),
        (
            {"train_samples": 99, "lr_decay_samples": 5, "lr_warmup_samples": 5},
            "--lr-warmup-samples 5 is not less than --lr-decay-samples 5",
        ),
        ({"train_iters": 10, "rampup_batch_size": (2, 2, 8), "global_batch_size": 8}, "Use --train-samples"),
        ({"train_iters": 9, "lr_decay_style": "WSD"}, "--lr-decay-style WSD needs --lr-wsd-decay-iters, the length"),
        (
            {"train_iters": 9, "lr_wsd_decay_iters": 2},
            "--lr-wsd-decay-iters 2 needs --lr-decay-style WSD, and it is linear",
        ),
        (
            {"train_iters": 9, "lr_decay_style": "WSD", "lr_wsd_decay_samples": 2},
            "--lr-wsd-decay-samples 2 cannot be combined with a run that is counted in iters",
        ),
        ({"lr_warmup_init": 1.0, "lr": 0.5}, r"--lr-warmup-init 1\.0 is more than --lr 0\.5"),
        ({"min_lr": 1.0, "lr": 0.5}, r"--min-lr 1\.0 is more than --lr 0\.5"),
        ({"global_batch_size": 3}, "--global-batch-size 3 is not a multiple of --micro-batch-size 2"),
    ],
)
def test_rules_hold_for_requests_and_for_runs(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        OptimRequest(**{"micro_batch_size": 2, **flags})
    known = {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 1, "lr": 1.0}
    with pytest.raises(ConfigError, match=sentence):
        OptimConfig(**{**known, **flags})
