"""Ranks that fail together: a step of a collective work succeeds everywhere or raises the same error everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.checkpoint.manifest import DamagedError
from megatron.errors import CheckpointError, ConfigError, DataError, StorageError
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import gather_json

# In the order of precedence: when ranks fail for different reasons, an older checkpoint helps only if all are damage.
_KINDS: tuple[type[Exception], ...] = (ConfigError, DataError, CheckpointError, StorageError, DamagedError)
_UNKNOWN = _KINDS.index(CheckpointError)


def together(mesh: ParallelMesh, work: Callable[[], Any]) -> list[Any]:
    """Runs `work` on this rank, waits for all ranks, and returns all results (JSON-able) in rank order.

    Raises:
        ConfigError, DataError, CheckpointError, StorageError, DamagedError: that of the rank whose failure weighs most,
            on every rank; another kind of failure becomes a CheckpointError on the other ranks.
    """
    value: Any = None
    failure: Exception | None = None
    try:
        value = work()
    except Exception as error:  # whatever it is, the other ranks must hear of it or they wait for ever
        failure = error
    answers = gather_json([_describe(failure), value], mesh.world)
    failures = [(kind, rank, text) for rank, ((kind, text), _) in enumerate(answers) if kind is not None]
    if not failures:
        return [answer for _, answer in answers]
    kind, rank, text = min(failures)
    if failure is not None and rank == mesh.world.rank:
        raise failure
    where = f"rank {rank}: " if mesh.world.size > 1 else ""
    raise _KINDS[kind](where + text) from failure


def on_first(mesh: ParallelMesh, work: Callable[[], Any]) -> Any:
    """Runs `work` on global rank 0 and returns its result (JSON-able) on every rank; its failure is everybody's."""
    return together(mesh, work if mesh.world.rank == 0 else lambda: None)[0]


def _describe(failure: Exception | None) -> tuple[int | None, str]:
    if failure is None:
        return None, ""
    for place, kind in enumerate(_KINDS):
        if type(failure) is kind:
            return place, str(failure)
    return _UNKNOWN, f"{type(failure).__name__}: {failure}"
