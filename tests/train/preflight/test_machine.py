"""Networks that cannot fit into the memory, and what the number of processes decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.config.parse import read_flags
from megatron.config.run_config import RunRequest
from megatron.errors import LaunchError
from megatron.parallel.launchers import Ranks
from megatron.train.preflight import machine
from megatron.train.preflight.machine import launch_failures, least_bytes, memory_problems

LAUNCH_FLAGS = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "8"),
    *("--max-position-embeddings", "8", "--micro-batch-size", "2", "--train-iters", "1", "--lr", "1"),
]


def launch_problems(*words: str) -> list[str]:
    reading = read_flags(words)
    _, failures = launch_failures(reading.unchecked(), reading.wrong, is_sound=False)
    return [str(failure) for failure in failures]


def test_layout_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "MASTER_ADDR": "h"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert launch_problems(*LAUNCH_FLAGS) == []
    (layout,) = launch_problems(*LAUNCH_FLAGS, "--tensor-model-parallel-size", "4")
    assert "requires a multiple of 4 processes, but this run has 6. Use 4 or 8" in layout
    (batch,) = launch_problems(*LAUNCH_FLAGS, "--global-batch-size", "16")
    assert "x 6 data-parallel replicas = 12. Use 12 or 24." in batch
    assert launch_problems("--fp16", "--tensor-model-parallel-size", "4") == [
        "--fp16 is not supported on this machine (cpu: DS_ACCELERATOR=cpu). Use --bf16, or drop --fp16 for float32."
    ], "the layout is compared with sizes of a network, which are missing"


def test_variables_that_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    reading = read_flags([*LAUNCH_FLAGS, "--fp16"])
    ranks, (launch, dtype) = launch_failures(reading.unchecked(), reading.wrong, is_sound=True)
    assert ranks is None
    assert isinstance(launch, LaunchError)
    assert "WORLD_SIZE=2 is set but RANK is not" in str(launch)
    assert "--fp16" in str(dtype)


SIZES = ["--num-layers", "40", "--hidden-size", "5120", "--num-attention-heads", "40", "--seq-length", "128"]
FLAGS = [*SIZES, "--max-position-embeddings", "128", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1"]
BLOCKS = 40 * (12 * 5120**2 + 13 * 5120)
ONE_RANK = Ranks(0, 1, 0, "here", 1, "none", is_one_node=True)
FOUR_RANKS = Ranks(0, 4, 0, "here", 1, "torchrun", is_one_node=True)
NEED = "the 12.6B parameters of --num-layers 40 --hidden-size 5120 need at least 187.5 GiB for weights, gradients and"


def request(*more: str) -> RunRequest:
    return read_flags([*FLAGS, "--data-path", "x", "--vocab-file", "v", "--merge-file", "m", *more]).unchecked()


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        (("--zero-stage", "0"), 1, 16 * BLOCKS),
        ((), 1, 16 * BLOCKS),
        (("--zero-stage", "3"), 1, 20 * BLOCKS),  # DeepSpeed copies the weights
        (("--bf16",), 1, 18 * BLOCKS),
        (("--bf16",), 4, 9 * BLOCKS),
        (("--bf16", "--zero-stage", "3"), 4, 18 * BLOCKS // 4),
        (("--bf16", "--tensor-model-parallel-size", "2"), 2, 9 * BLOCKS),
        (("--bf16", "--optimizer", "lion"), 1, 14 * BLOCKS),
        (("--bf16", "--optimizer", "muon", "--ema-decay", "0.9"), 1, 18 * BLOCKS),
        (("--use-bnb-optimizer",), 1, None),
        (("--cpu-optimizer",), 1, None),
        (("--elastic", "--global-batch-size", "4"), 1, None),
        (("--freeze", "decoder.*"), 1, None),
    ],
)
def test_the_least_that_a_rank_holds(flags: tuple[str, ...], world_size: int, expected: int | None) -> None:
    assert least_bytes(request(*flags), world_size) == expected


def test_offloading_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}))
    assert least_bytes(request("--deepspeed_config", str(tmp_path / "ds.json")), 1) is None


def test_what_cannot_fit_is_refused_and_what_hardly_fits_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def failures(total_gib: int, free_gib: int, ranks: Ranks, *flags: str) -> list[str]:
        monkeypatch.setattr(machine, "total_memory_bytes", lambda: total_gib * 2**30)
        monkeypatch.setattr(machine, "available_memory_bytes", lambda: free_gib * 2**30)
        return list(memory_problems(request(*flags), ranks))

    (alone,) = failures(180, 180, ONE_RANK)
    assert alone.startswith(NEED) and "but this machine has 180.0 GiB. Use a smaller network" in alone
    (shared,) = failures(180, 180, FOUR_RANKS, "--tensor-model-parallel-size", "4")
    assert shared.startswith(NEED) and "this machine, which 4 ranks share, has 180.0 GiB" in shared
    assert capsys.readouterr().err == ""
    assert failures(300, 200, ONE_RANK) == []
    assert "; this machine has 200.0 GiB left. Use" in capsys.readouterr().err
    assert failures(400, 350, ONE_RANK) == [] and capsys.readouterr().err == ""


def test_a_gpu_is_judged_by_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cuda_unavailable_reason", lambda: "")
    monkeypatch.setattr(machine, "largest_gpu_memory_bytes", lambda: 80 * 2**30)
    (refusal,) = memory_problems(request("--bf16"), ONE_RANK)
    assert "need at least 211.0 GiB" in refusal and "the largest GPU here has 80.0 GiB" in refusal
    monkeypatch.setattr(machine, "largest_gpu_memory_bytes", lambda: None)
    assert list(memory_problems(request("--bf16"), ONE_RANK)) == []
