"""The benchmark of what a step costs the host, and what it counts with."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import host_cost
from benchmarks.step_phases import AFTER, BACKWARD, BEFORE, FORWARD, OperationCounter, StepPhases


def test_operations_and_waits_are_counted_by_phase() -> None:
    phases = StepPhases()
    counter = OperationCounter(phases)
    weight = torch.ones(3, requires_grad=True)
    phases.start()
    with counter.counting(), phases.following():
        torch.zeros(3)
        phases.enter("forward")
        loss = weight.sin().sum()
        phases.enter("backward")
        loss.backward()
        weight.grad.mul_(2).tolist()
    seconds = phases.finish()
    assert counter.operations[BEFORE, "zeros"] == counter.operations[FORWARD, "sin"] == 1
    assert counter.operations[BACKWARD, "cos"] == counter.operations[AFTER, "mul_"] == 1
    assert counter.of_phase(AFTER) == 1
    (wait,) = counter.waits_of_phase(AFTER)
    assert wait.startswith("tolist at benchmarks/test_host_cost.py:") and not counter.waits_of_phase(FORWARD)
    assert min(seconds.values()) >= 0 and sum(seconds.values()) > 0
    assert torch.zeros(1).tolist() == [0.0] and sum(counter.waits.values()) == 1  # nothing is counted any more


def test_reading_a_value_and_copying_between_devices_are_waits() -> None:
    phases = StepPhases()
    counter = OperationCounter(phases)
    with counter.counting():
        torch.ones(1).item()
        torch.ones(2).nonzero()
        torch.ones(1).to("meta")
        torch.ones(1).to("meta", non_blocking=True)
    assert sorted(wait.split()[0] for wait in counter.waits_of_phase(BEFORE)) == [
        "_local_scalar_dense",
        "_to_copy",
        "nonzero",
    ]


@pytest.mark.full
@pytest.mark.slow
def test_the_benchmark_prints_both_sides_and_their_ratios(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--rounds", "2", "--steps", "1", "--layers", "1", "--widths", "8", "--dtypes", "fp32", "bf16"]
    assert host_cost.main([*words, "--zero-stages", "0", "3", "--micro-batches", "2"]) == 0
    records = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    cases = {(record["dtype"], record["zero_stage"]) for record in records}
    assert cases == {("fp32", 0), ("fp32", 3), ("bf16", 3)}  # ZeRO 0 exists in fp32 only
    for case in cases:
        figures = {
            record["figure"]: record["value"] for record in records if (record["dtype"], record["zero_stage"]) == case
        }
        assert figures["ours_operations_forward"] > 0 < figures["plain_operations_forward"]
        assert figures["plain_operations_after_backward"] < 40  # DeepSpeed's changes to torch are not in it
        assert figures["ratio_step"] > 0 < figures["ratio_forward_and_backward"]
