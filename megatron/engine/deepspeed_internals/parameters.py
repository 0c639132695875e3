"""Parameters under ZeRO-3 (`runtime/zero/partition_parameters.py`), and their marks for norms."""

from __future__ import annotations

from operator import attrgetter

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

is_measured = attrgetter("tensor_model_parallel")  # set by `mark_parameter`


def partition_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's ZeRO-3 partition of a parameter, padding included; None if it is not partitioned.

    Shapes: result `[n]`.
    """
    partition = getattr(parameter, "ds_tensor", None)
    return None if partition is None else partition.data.view(-1)


def is_whole(parameter: nn.Parameter) -> bool:
    """Returns True if all elements of a parameter are on this rank: not partitioned by ZeRO-3, or gathered."""
    return getattr(parameter, "ds_status", None) in (None, ZeroParamStatus.AVAILABLE)


def whole_numel(parameter: nn.Parameter) -> int:
    """Number of elements of a parameter before partitioning."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def mark_parameter(parameter: nn.Parameter, *, is_counted: bool, is_tied_copy: bool = False) -> None:
    """Marks whether this rank counts a parameter in the gradient norm, and whether another stage owns it."""
    parameter.tensor_model_parallel = is_counted  # type: ignore[attr-defined]
    parameter.ds_pipe_replicated = is_tied_copy  # type: ignore[attr-defined]
