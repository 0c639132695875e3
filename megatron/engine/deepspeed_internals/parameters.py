"""Parameters: what ZeRO-3 leaves of them on a rank (`runtime/zero/partition_parameters.py`), and marks for norms."""

from __future__ import annotations

from operator import attrgetter

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

is_measured = attrgetter("tensor_model_parallel")  # what `mark_parameter` has said


def partition_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """What ZeRO-3 leaves of a parameter on this rank, padding included; None if it does not divide it.

    Shapes: result `[n]`.
    """
    partition = getattr(parameter, "ds_tensor", None)
    return None if partition is None else partition.data.view(-1)


def is_whole(parameter: nn.Parameter) -> bool:
    """Whether all elements of a parameter are on this rank: ZeRO-3 does not divide it, or has gathered it."""
    return getattr(parameter, "ds_status", None) in (None, ZeroParamStatus.AVAILABLE)


def whole_numel(parameter: nn.Parameter) -> int:
    """Elements of a parameter, whether or not ZeRO-3 divides it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def mark_parameter(parameter: nn.Parameter, *, is_counted: bool, is_tied_copy: bool = False) -> None:
    """Says whether this rank counts a parameter in the gradient norm, and whether another stage owns it."""
    parameter.tensor_model_parallel = is_counted  # type: ignore[attr-defined]
    parameter.ds_pipe_replicated = is_tied_copy  # type: ignore[attr-defined]
