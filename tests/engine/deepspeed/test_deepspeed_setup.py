"""The GPU that DeepSpeed chooses, and what its messages take."""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch

from megatron.device import Stopwatch
from megatron.engine import deepspeed_setup
from megatron.engine.buckets.bucket_queue import Buckets
from megatron.engine.deepspeed_setup import averaging_notice, timed_messages
from megatron.engine.freezing import NOTHING_FROZEN
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import TRANSFER


def test_deepspeed_takes_the_gpu_that_this_process_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets GPU LOCAL_RANK, of which there may be one only, and compares that with Open MPI's."""
    seen: list[tuple[str, str]] = []

    def initialize(**_: Any) -> tuple[Any, ...]:
        seen.append((os.environ["LOCAL_RANK"], os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]))
        return (SimpleNamespace(optimizer=None),)

    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setattr(deepspeed, "initialize", initialize)
    monkeypatch.setattr(deepspeed_setup, "build_optimizer", lambda *_, **__: SimpleNamespace(param_groups=[]))
    mesh: Any = dataclasses.replace(ParallelMesh.single(), device=torch.device("cuda", 0))
    settings = {"zero_optimization": {"stage": 0}, "train_batch_size": 1}
    nothing: Any = None
    deepspeed_setup.initialize(settings, nothing, mesh, torch.nn.Module(), NOTHING_FROZEN, Buckets(1000))
    assert seen == [("0", "0")] and os.environ["LOCAL_RANK"] == "3"


def test_messages_are_timed_in_the_block_and_everything_else_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Any, ...]] = []

    def note(*arguments: Any, **options: Any) -> str:
        sent.append((arguments, options))
        return "handle"

    backend = SimpleNamespace(all_reduce=note, send=note, get_rank=lambda group=None: 3)
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", backend)
    watch = Stopwatch()
    watch.start()
    with timed_messages(watch):
        timed = deepspeed.comm.comm.cdb
        assert timed is not backend and timed.get_rank() == 3
        assert timed.all_reduce("gradient", async_op=True) == timed.send("hidden", 1) == "handle"
    assert sent == [(("gradient",), {"async_op": True}), (("hidden", 1), {})]
    assert [kind for kind, *_ in watch.take().parts] == ["", TRANSFER]
    assert deepspeed.comm.comm.cdb is backend
    with timed_messages(None):
        assert deepspeed.comm.comm.cdb is backend


def test_averages_that_round_are_told() -> None:
    def notice(stage: int, ranks: int = 8, exchanged: torch.dtype | None = None, **settings: Any) -> str | None:
        buckets = Buckets(1000, exchanged_dtype=exchanged)
        return averaging_notice({"zero_optimization": {"stage": stage}, **settings}, ranks, buckets)

    bf16: Any = {"bf16": {"enabled": True}}
    fp16: Any = {"fp16": {"enabled": True}}
    assert notice(1, **bf16, communication_data_type="fp32") is notice(2) is notice(2, 1, **bf16) is None
    assert notice(2, **bf16, communication_data_type="fp32") is notice(2, 8, torch.bfloat16, **bf16) is None
    assert "stage 2 averages each micro-batch over 8 ranks in bf16, with rounding errors" in str(notice(2, **bf16))
    assert "stage 3 averages each micro-batch over 2 ranks in fp16" in str(notice(3, 2, **fp16))
