"""Work whose outcome all ranks share: it succeeds on every rank, or the same error is raised on every rank.

The outcome is agreed with one all-reduce of a single number; only a failure costs more, the broadcast of its text.
Results travel only where they are asked for, so what a rank sends and receives does not grow with the number of ranks,
except on rank 0 of `gather_on_first`. All messages go over `mesh.control` and carry CPU tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from megatron.errors import (
    CheckpointError,
    ConfigError,
    DamagedError,
    DataError,
    MegatronError,
    StorageError,
    describe_failure,
    rebuild_failure,
)
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max, broadcast_bytes, gather_bytes

Result = TypeVar("Result")

# By precedence: when ranks fail for different reasons, an older checkpoint helps only if all of them are damage.
_KINDS: tuple[type[MegatronError], ...] = (ConfigError, DataError, CheckpointError, StorageError, DamagedError)
_FALLBACK = CheckpointError


def run_on_all(mesh: ParallelMesh, work: Callable[[], Result]) -> Result:
    """Runs `work` on every rank, waits for all of them, and returns this rank's own result.

    Raises:
        ConfigError, DataError, CheckpointError, StorageError, DamagedError: some rank failed. If several did, the error
            is the one of highest precedence and lowest rank. That rank raises what it caught, the others the same with
            "rank N: " before the text; a failure of another type becomes a CheckpointError there.
    """
    result: list[Result] = []
    failure: Exception | None = None
    try:
        result.append(work())
    except Exception as caught:  # of any kind: the other ranks must hear of it, or they wait forever
        failure = caught
    _raise_everywhere(mesh, failure)
    return result[0]


def gather_on_first(mesh: ParallelMesh, work: Callable[[], Any]) -> list[Any] | None:
    """Runs `work` on every rank and returns the results (JSON-able) in rank order on rank 0, None on the others.

    Raises:
        as `run_on_all`.
    """
    encoded = run_on_all(mesh, lambda: json.dumps(work()).encode())
    texts = gather_bytes(encoded, mesh.control)
    return None if texts is None else [json.loads(text) for text in texts]


def run_on_first(mesh: ParallelMesh, work: Callable[[], Any]) -> Any:
    """Runs `work` on global rank 0 and returns its result (JSON-able) on every rank.

    Raises:
        as `run_on_all`.
    """
    encoded = run_on_all(mesh, lambda: json.dumps(work()).encode() if mesh.control.rank == 0 else b"")
    return json.loads(broadcast_bytes(encoded, mesh.control))


def is_same_on_all(mesh: ParallelMesh, digest: bytes) -> bool:
    """Whether every rank gives the same digest; all must be of one length."""
    words = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(torch.int64)
    largest, negated_smallest = all_reduce_max(torch.stack([words, -words]), mesh.control)
    return torch.equal(largest, -negated_smallest)


def _raise_everywhere(mesh: ParallelMesh, failure: Exception | None) -> None:
    """Returns if no rank failed, else raises the failure of highest precedence on every rank."""
    control = mesh.control
    # One number orders all failures: precedence first, then the lower rank; 0 is success.
    own = 0 if failure is None else (len(_KINDS) - _precedence(failure)) * control.size - control.rank
    worst = int(all_reduce_max(torch.tensor([own], dtype=torch.int64), control))
    if worst == 0:
        return
    rank = -worst % control.size
    report = [] if failure is None else describe_failure(failure, _KINDS)
    report = json.loads(broadcast_bytes(json.dumps(report).encode(), control, source=rank))
    if failure is not None and rank == control.rank:
        raise failure
    where = f"rank {rank}: " if control.size > 1 else ""
    raise rebuild_failure(report, _KINDS, _FALLBACK, where) from failure


def _precedence(failure: Exception) -> int:
    """The place of a failure in the order of precedence; one of an unknown type weighs as much as the fallback."""
    kind = describe_failure(failure, _KINDS).kind
    names = [known.__name__ for known in _KINDS]
    return names.index(kind if kind in names else _FALLBACK.__name__)
