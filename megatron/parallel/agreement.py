"""Collective execution: work succeeds on every rank, or the same error is raised on every rank.

Success costs one all-reduce of a single integer; a failure also costs a broadcast of its text. Results are sent only to
the ranks that use them, so the bytes per rank do not grow with the world size, except on rank 0 of `gather_on_first`.
All messages are CPU tensors sent over `mesh.control`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from megatron.errors import (
    CheckpointError,
    ConfigError,
    DamagedError,
    DataError,
    MegatronError,
    NumericsError,
    StorageError,
    describe_failure,
    rebuild_failure,
)
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max, broadcast_bytes, gather_bytes

Result = TypeVar("Result")

# By precedence: an older checkpoint is a remedy only if every failing rank found damage, so damage comes last.
_KINDS: tuple[type[MegatronError], ...] = (
    ConfigError,
    DataError,
    NumericsError,
    CheckpointError,
    StorageError,
    DamagedError,
)
_FALLBACK = CheckpointError


def run_on_all(mesh: ParallelMesh, work: Callable[[], Result]) -> Result:
    """Runs `work` on every rank, waits for all of them, and returns this rank's own result.

    Raises:
        ConfigError, DataError, NumericsError, CheckpointError, StorageError, DamagedError: a rank failed. If several
            did, the error of highest precedence, then of lowest rank, is raised. That rank re-raises its own
            exception; the others raise the same error prefixed with "rank N: ", or a CheckpointError if it is of
            another type.
    """
    result: list[Result] = []
    failure: Exception | None = None
    try:
        result.append(work())
    except Exception as caught:  # of any type: unless it is reported, the other ranks would hang
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
    """Returns True if every rank passes the same digest; all must have the same length."""
    values = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(torch.int64)
    largest, negated_smallest = all_reduce_max(torch.stack([values, -values]), mesh.control)
    return torch.equal(largest, -negated_smallest)


def _raise_everywhere(mesh: ParallelMesh, failure: Exception | None) -> None:
    """Returns if no rank failed, else raises the failure of highest precedence on every rank."""
    control = mesh.control
    # A single integer orders all failures: by precedence, then by lower rank; 0 means success.
    local = 0 if failure is None else (len(_KINDS) - _precedence(failure)) * control.size - control.rank
    worst = int(all_reduce_max(torch.tensor([local], dtype=torch.int64), control))
    if worst == 0:
        return
    rank = -worst % control.size
    report = [] if failure is None else describe_failure(failure, _KINDS)
    report = json.loads(broadcast_bytes(json.dumps(report).encode(), control, source=rank))
    if failure is not None and rank == control.rank:
        raise failure
    has_rank = control.size == 1 or re.match(r"rank \d+: ", report[1])  # raised by an earlier collective
    where = "" if has_rank else f"rank {rank}: "
    raise rebuild_failure(report, _KINDS, _FALLBACK, where) from failure


def _precedence(failure: Exception) -> int:
    """The precedence of a failure; unknown types rank as the fallback does."""
    kind = describe_failure(failure, _KINDS).kind
    names = [known.__name__ for known in _KINDS]
    return names.index(kind if kind in names else _FALLBACK.__name__)
