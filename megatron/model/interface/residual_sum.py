"""Hidden states as the pending sum of the residual and a branch, computed by the next norm in its own pass.

Between and within blocks they are matrices with a row per token, which saves every product and gradient two reshapes.
With sequence parallelism they keep three dimensions, since the ranks split the tokens of each sample.
"""

from __future__ import annotations

import torch

from megatron.model.interface.step_context import StepContext

# Branch output, residual, and bias of the branch; residual and bias are None once they have been added.
# Shapes: branch and residual `[b * s, h]`, with sequence parallelism `[b, s/t, h]`; bias `[h]`.
ResidualSum = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def as_sum(hidden: torch.Tensor | ResidualSum, context: StepContext) -> ResidualSum:
    """Converts hidden states of either form to a sum. Shapes: hidden `[b, s, h]` unless it is a sum."""
    if isinstance(hidden, tuple):
        return hidden
    return hidden if context.splits_sequence else hidden.flatten(0, 1), None, None


def total(branch: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None = None) -> torch.Tensor:
    if bias is not None:
        branch = branch + bias
    return branch if residual is None else residual + branch
