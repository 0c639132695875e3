"""Checks what the amounts of memory add up to."""

from __future__ import annotations

from megatron.engine.memory.amounts import Amounts


def test_the_total_counts_the_host_as_well() -> None:
    assert Amounts(parameters=8, gradients=4, optimizer=2, on_device=12).total == 14
