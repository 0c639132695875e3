"""The communication backends that are available."""

from __future__ import annotations

import torch.distributed as dist


def usable_backends() -> dict[str, bool]:
    """The torch.distributed backends in this build of torch; all False without torch.distributed."""
    if not dist.is_available():
        return {"gloo": False, "nccl": False, "mpi": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
