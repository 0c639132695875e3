"""Tasks of the evaluation harness on all ranks at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron.errors import ConfigError
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import broadcast_json

_KEPT = ("results", "versions", "n-shot", "n-samples", "higher_is_better")


def run_harness(
    model: Any,
    mesh: ParallelMesh,
    names: Sequence[str],
    *,
    include_path: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    bootstrap_iters: int = 100_000,
) -> dict[str, dict[str, Any]]:
    """Runs tasks of the harness; collective over all ranks, which all get the results.

    Args:
        model: of `harness_model`.
        names: of the tasks.
        include_path: folder of further tasks.
        num_fewshot: solved examples before each question; None for what a task says.
        limit: take only so many items of each task from the beginning.
        bootstrap_iters: draws behind the standard errors of metrics without a formula.

    Returns:
        `results` and what describes them (`versions`, `n-shot`, `n-samples`, `higher_is_better`), each by task.

    Raises:
        ConfigError: the harness has no task of that name.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    # The index of the harness's own tasks takes seconds; it is not needed where the folder has all of them.
    index = TaskManager(include_path=include_path, include_defaults=False)
    if not set(names) <= set(index.all_tasks):
        index = TaskManager(include_path=include_path)
    unknown = [name for name in names if name not in index.all_tasks]
    if unknown:
        raise ConfigError(
            f"the evaluation harness has no task {', '.join(unknown)}. `lm_eval ls tasks` shows its own; tasks over "
            "local files are YAML files in the folder --include_path."
        )
    found = simple_evaluate(
        model=model,
        tasks=list(names),
        num_fewshot=num_fewshot,
        limit=limit,
        bootstrap_iters=bootstrap_iters,
        task_manager=index,
        log_samples=False,
    )
    # The harness returns results on the first process of a node only.
    kept = {key: found[key] for key in _KEPT if key in found} if found is not None else {}
    results: dict[str, dict[str, Any]] = broadcast_json(json.loads(json.dumps(kept, default=str)), mesh.world)
    return results
