"""The differentiable operations against float64, on each device."""

from __future__ import annotations

import pytest
import torch

from megatron.kernels.native.library import Library
from tests.kernels.devices.cases import CASES
from tests.kernels.devices.checks import DEVICES, LAYOUTS, TOLERANCES, check_case


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("operation", CASES)
def test_values_and_gradients(compiled: Library, operation: str, dtype: torch.dtype, device: str) -> None:
    for number, case in enumerate(CASES[operation]()):
        check_case(case, dtype, device, LAYOUTS[number % len(LAYOUTS)])
