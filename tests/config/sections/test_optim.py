"""Optimizer, schedule and batch sizes, as requested and as resolved."""

from __future__ import annotations

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
