"""The elementwise part of dropout."""

from __future__ import annotations

import torch

from megatron.kernels.dropout import masked_scale


def test_masked_scale() -> None:
    x, keep = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True])
    assert masked_scale(x, keep, 2.0).tolist() == [2.0, 0.0, 6.0]
    assert masked_scale(x.bfloat16(), keep, 2.0).dtype == torch.bfloat16
