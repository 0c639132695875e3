"""Activation functions by the names of `--activation-function`, and their gated forms."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def activation(x: torch.Tensor, name: str) -> torch.Tensor:
    """The activation `name`, elementwise.

    Source: Hendrycks and Gimpel, "Gaussian error linear units", 2016, section 2 (gelu, gelu_tanh, silu); So et al.,
    "Primer", 2021, section 3 (squared_relu).
    """
    match name:
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "squared_relu":
            return F.relu(x).square()
        case "silu":
            return F.silu(x)
        case "linear":
            return x
    raise ValueError(f"unknown activation {name!r}")


def gated(x: torch.Tensor, name: str) -> torch.Tensor:
    """The gated unit `activation(gate) * up`.

    Shapes: x `[..., 2, f]`, first the gate, then up; result `[..., f]`.

    Source: Shazeer, "GLU variants improve transformer", 2020, section 2.
    """
    gate, up = x.unbind(-2)
    return activation(gate, name) * up
