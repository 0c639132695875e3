"""Which libraries can carry messages between ranks here."""

from __future__ import annotations

import torch.distributed as dist


def usable_backends() -> dict[str, bool]:
    """The torch.distributed backends this torch was built with; all False where it has no torch.distributed at all."""
    if not dist.is_available():
        return {"gloo": False, "nccl": False, "mpi": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
