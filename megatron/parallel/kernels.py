"""Agreement of all ranks on the implementation of each operation."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron import log
from megatron.config.sections.computation import OPERATIONS
from megatron.kernels.choice import Implementation, Kernels
from megatron.kernels.native.choosing import choose
from megatron.kernels.native.library import library
from megatron.parallel.agreement import run_on_all
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max

_ORDER = tuple(Implementation)
_NO_DIGEST = 1 << 62  # larger than any digest, which has 60 bits


def agreed_kernels(requested: Mapping[str, str], mesh: ParallelMesh) -> Kernels:
    """Chooses the requested implementations, or the fastest; collective over the mesh.

    All ranks use torch for an operation whose implementation differs between nodes, for example if only one of them has
    the library, or has it from other sources: replicas that round differently would diverge.

    Args:
        requested: an implementation or `auto` for each operation.

    Raises:
        ConfigError: a requested implementation is missing on a rank.
    """
    local = run_on_all(mesh, lambda: choose(requested, mesh.device))
    uses = [[getattr(local, operation) is kind for kind in _ORDER] for operation in OPERATIONS]
    used = all_reduce_max(torch.tensor(uses, dtype=torch.int64), mesh.control)
    is_csrc, shares = used[:, _ORDER.index(Implementation.CSRC)] > 0, _shares_sources(local, mesh)
    differs = (used.sum(dim=1) > 1) | (is_csrc & (not shares))
    split = [operation for operation, is_split in zip(OPERATIONS, differs.tolist(), strict=True) if is_split]
    if split and mesh.world.rank == 0:
        log.warning(
            f"not all ranks have the same kernels, so all use torch for {', '.join(split)}. Build the library on every "
            "node, or share its folder: python tools/build_kernels.py"
        )
    return local.replace(dict.fromkeys(split, Implementation.TORCH))


def _shares_sources(local: Kernels, mesh: ParallelMesh) -> bool:
    """Returns True if all ranks that use the library have it from the same sources."""
    built = library() if Implementation.CSRC in vars(local).values() else None
    digest = None if built is None else int(built.sources[:15] or "0", 16)
    ends = [-_NO_DIGEST, -_NO_DIGEST] if digest is None else [digest, -digest]
    largest, negated_smallest = all_reduce_max(torch.tensor(ends, dtype=torch.int64), mesh.control).tolist()
    return bool(largest <= -negated_smallest)


def kernels_line(kernels: Kernels) -> str:
    """Lists the operations of each implementation, for the log."""
    groups = {kind: [operation for operation in OPERATIONS if getattr(kernels, operation) is kind] for kind in _ORDER}
    return "kernels: " + "; ".join(f"{kind.value}: {', '.join(names)}" for kind, names in groups.items() if names)
