"""The report names every operation and does not import what it looks for."""

from __future__ import annotations

from megatron.kernels.native.report import kernel_report


def test_report_names_every_operation_once() -> None:
    report = kernel_report()
    operations = [choice.operation for choice in report]
    assert len(set(operations)) == len(operations) >= 5
    assert all(choice.implementation and choice.note for choice in report)
