"""Peaks of devices by the names that drivers give them."""

from __future__ import annotations

import pytest

from megatron.observe.speed import peak_flops_per_second


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA A100 80GB PCIe", 312.0), ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H100 NVL", 835.5), ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4), ("NVIDIA A10", 125.0), ("NVIDIA A10G", 70.0), ("NVIDIA L40S", 362.1),
        ("NVIDIA L4", 121.0), ("NVIDIA B200", 2250.0), ("Tesla V100-SXM2-32GB", None), ("cpu", None),
    ],
)  # fmt: skip
def test_known_devices(name: str, teraflops: float | None) -> None:
    peak = peak_flops_per_second(name, is_half_precision=True, given_teraflops=None)
    assert peak == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_the_table_is_for_half_precision_and_the_user_knows_better() -> None:
    assert peak_flops_per_second("NVIDIA H200", is_half_precision=False, given_teraflops=None) is None
    assert peak_flops_per_second("NVIDIA H200", is_half_precision=False, given_teraflops=67.0) == 67e12
    assert peak_flops_per_second("cpu", is_half_precision=True, given_teraflops=0.25) == 0.25e12
