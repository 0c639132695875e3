"""Messages of a run that is out of memory."""

from __future__ import annotations

import pytest
import torch

from megatron.errors import OutOfMemoryError
from trident.plan.out_of_memory import explained_memory
from trident.plan.requests import cluster_of, next_fitting, read_plan_request

WORDS = (
    *("--model-preset", "llama-3-8b", "--micro-batch-size", "4", "--global-batch-size", "8", "--bf16"),
    *("--seq-length", "8192", "--lr", "1e-4", "--train-iters", "5", "--data-path", "x"),
    *("--vocab-file", "v", "--merge-file", "m"),
)


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=["cuda", "cpu"],
)
def test_the_error_contains_the_estimate_by_kind(failure: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trident.plan.out_of_memory.total_memory_bytes", lambda: 24 * 2**30)
    _, request = read_plan_request(WORDS)
    with pytest.raises(OutOfMemoryError) as raised, explained_memory(WORDS, request):
        raise failure
    text = str(raised.value)
    assert text.startswith(str(failure).splitlines()[0].rstrip("."))
    assert "dp 1, ZeRO 1, recompute none, micro-batch 4):" in text
    assert all(kind in text for kind in ("activations", "optimizer", "gradients", "weights"))
    assert text.endswith("No smaller layout of these devices is estimated to fit: use more devices.")


def test_the_next_layout_that_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trident.plan.out_of_memory.total_memory_bytes", lambda: 200 * 2**30)
    _, request = read_plan_request(WORDS)
    match = r"297\.9 of 200\.0: activations .*Next layout that fits: .*--micro-batch-size 1 "
    with pytest.raises(OutOfMemoryError, match=match), explained_memory(WORDS, request):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_slower_layout_that_takes_less_is_named() -> None:
    words, request = read_plan_request(
        ["--model-preset", "llama-3-8b", "--bf16", "--zero-stage", "2", "--micro-batch-size", "1"]
    )
    own, other = next_fitting(words, request, cluster_of(request, 8))
    assert own.fits
    assert other is not None
    assert other.memory.total < own.memory.total


@pytest.mark.parametrize("text", ["CUDA out of memory", ""])
def test_a_hint_that_fails_does_not_replace_the_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("trident.plan.out_of_memory.next_fitting", fail)
    _, request = read_plan_request(WORDS)
    with pytest.raises(OutOfMemoryError, match=rf"^{text}\. Use a smaller"), explained_memory(WORDS, request):
        raise torch.OutOfMemoryError(text)


def test_other_errors_stay_as_they_are() -> None:
    _, request = read_plan_request(WORDS)
    with pytest.raises(RuntimeError, match="^a shape$"), explained_memory(WORDS, request):
        raise RuntimeError("a shape")
