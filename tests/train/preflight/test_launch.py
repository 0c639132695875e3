"""What the number of processes decides is checked where all that it is compared with is known."""

from __future__ import annotations

import pytest

from megatron.config.parse import read_flags
from megatron.errors import LaunchError
from megatron.train.preflight.machine import launch_failures

FLAGS = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "8"),
    *("--max-position-embeddings", "8", "--micro-batch-size", "2", "--train-iters", "1", "--lr", "1"),
]


def said(*words: str) -> list[str]:
    reading = read_flags(words)
    _, failures = launch_failures(reading.unchecked(), reading.wrong, is_sound=False)
    return [str(failure) for failure in failures]


def test_layout_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "MASTER_ADDR": "h"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert said(*FLAGS) == []
    (layout,) = said(*FLAGS, "--tensor-model-parallel-size", "4")
    assert "requires a multiple of 4 processes, but this run has 6. Use 4 or 8" in layout
    (batch,) = said(*FLAGS, "--global-batch-size", "16")
    assert "x 6 data-parallel replicas = 12. Use 12 or 24." in batch
    assert said("--fp16", "--tensor-model-parallel-size", "4") == [
        "--fp16 is not supported on this machine (cpu: DS_ACCELERATOR=cpu). Use --bf16, or drop --fp16 for float32."
    ], "the layout is compared with sizes of a network, which are missing"


def test_variables_that_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    reading = read_flags([*FLAGS, "--fp16"])
    ranks, (launch, dtype) = launch_failures(reading.unchecked(), reading.wrong, is_sound=True)
    assert ranks is None
    assert isinstance(launch, LaunchError)
    assert "WORLD_SIZE=2 is set but RANK is not" in str(launch)
    assert "--fp16" in str(dtype)
