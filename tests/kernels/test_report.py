"""The report names every operation and does not import what it looks for."""

from __future__ import annotations

from megatron.kernels.report import is_installed, kernel_report


def test_report_names_every_operation_once() -> None:
    report = kernel_report()
    operations = [choice.operation for choice in report]
    assert len(set(operations)) == len(operations) >= 5
    assert all(choice.implementation and choice.note for choice in report)


def test_is_installed_does_not_import() -> None:
    assert is_installed("json")
    assert not is_installed("no_such_package_here")
    assert not is_installed("no_such_package_here.part")
