"""The implementation of each operation that all ranks of a run use."""

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
    """The implementations that are asked for, or the fastest; collective over the mesh.

    Where nodes differ in what they have, such as a library that was built on one of them only or from other sources,
    all use torch: replicas that round differently would drift apart.

    Args:
        requested: an implementation or `auto` for each operation.

    Raises:
        ConfigError: an implementation was asked for that a rank does not have.
    """
    own = run_on_all(mesh, lambda: choose(requested, mesh.device))
    places = [[getattr(own, operation) is kind for kind in _ORDER] for operation in OPERATIONS]
    used = all_reduce_max(torch.tensor(places, dtype=torch.int64), mesh.control)
    is_csrc, shares = used[:, _ORDER.index(Implementation.CSRC)] > 0, _shares_sources(own, mesh)
    differs = (used.sum(dim=1) > 1) | (is_csrc & (not shares))
    split = [operation for operation, is_split in zip(OPERATIONS, differs.tolist(), strict=True) if is_split]
    if split and mesh.world.rank == 0:
        log.warning(
            f"not all ranks have the same kernels, so all use torch for {', '.join(split)}. Build the library on every "
            "node, or share its folder: python tools/build_kernels.py"
        )
    return own.replace(dict.fromkeys(split, Implementation.TORCH))


def _shares_sources(own: Kernels, mesh: ParallelMesh) -> bool:
    """Whether the libraries of the ranks that use one were built from the same sources."""
    built = library() if Implementation.CSRC in vars(own).values() else None
    digest = None if built is None else int(built.sources[:15] or "0", 16)
    ends = [-_NO_DIGEST, -_NO_DIGEST] if digest is None else [digest, -digest]
    largest, negated_smallest = all_reduce_max(torch.tensor(ends, dtype=torch.int64), mesh.control).tolist()
    return bool(largest <= -negated_smallest)


def kernels_line(kernels: Kernels) -> str:
    """Which operations have which implementation, for the log."""
    groups = {kind: [operation for operation in OPERATIONS if getattr(kernels, operation) is kind] for kind in _ORDER}
    return "kernels: " + "; ".join(f"{kind.value}: {', '.join(names)}" for kind, names in groups.items() if names)
