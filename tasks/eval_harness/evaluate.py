"""Runs tasks of EleutherAI's lm-evaluation-harness on a checkpoint, with upstream's flags.

    python tasks/eval_harness/evaluate.py --load checkpoints/gpt2 --task_list lambada_openai,piqa --results_path r.json
    torchrun --nproc_per_node 2 tasks/eval_harness/evaluate.py --load checkpoints/gpt2 --task_list own \
        --include_path my_tasks --tensor-model-parallel-size 2

The network, its dtype and the tokenizer come from the checkpoint; flags of the trainer must agree with it. Requires the
package lm-eval. The harness downloads the data of its tasks; --include_path adds YAML files of tasks on local data.

Source: bigscience Megatron-DeepSpeed `tasks/eval_harness/evaluate.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, flag
from megatron.config.program_flags import ToolRequest, parse_over


@dataclass(frozen=True)
class HarnessFlags(ConfigSection):
    """Upstream's flags of this program, in addition to the trainer's."""

    load: str = flag(
        help="folder of checkpoints (the newest valid one is used), or one checkpoint", path=PathUse.FOLDER
    )
    task_list: str = flag("all", "comma-separated names of tasks", spelled=("--task_list",))
    results_path: str = flag(
        "./results.json", "JSON file for the results", spelled=("--results_path",), path=PathUse.NEW_FILE
    )
    adaptive_seq_len: bool = flag(
        False,
        "accepted and ignored; batches are always padded to their longest text only",
        spelled=("--adaptive_seq_len",),
    )
    eval_fp32: bool = flag(False, "evaluate in float32 instead of the training dtype", spelled=("--eval_fp32",))
    intermed_results: bool = flag(False, "write the results after every task", spelled=("--intermed_results",))
    bootstrap_iters: int = flag(
        100_000,
        "bootstrap iterations for standard errors of metrics without a formula",
        at_least=0,
        spelled=("--bootstrap_iters",),
    )
    micro_bs_multiplier: int = flag(
        1,
        "multiplier of the micro-batch size, as evaluation needs less memory",
        at_least=1,
        spelled=("--micro_bs_multiplier",),
    )
    num_fewshot: int | None = flag(
        None,
        "few-shot examples per question; the task's default if unset",
        at_least=0,
        spelled=("--num_fewshot",),
    )
    limit: int | None = flag(None, "evaluate only the first N items of each task", at_least=1)
    include_path: str | None = flag(
        None, "folder with YAML files of additional tasks", spelled=("--include_path",), path=PathUse.FOLDER
    )

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        if self.task_list == "all":
            yield (
                "--task_list all is not supported: the harness has thousands of tasks. List names, such as --task_list "
                "lambada_openai,piqa (see `lm_eval ls tasks`)."
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program on the command line's flags."""
    request = parse_over(HarnessFlags, sys.argv[1:] if argv is None else argv, "evaluate.py", description=__doc__ or "")

    from megatron.files.replacing import check_writable
    from megatron.parallel.agreement import run_on_first
    from megatron.parallel.joining import close_mesh, open_mesh

    mesh = open_mesh(request.layout)
    try:
        run_on_first(mesh, lambda: check_writable(Path(request.flags.results_path)))
        _run(request, mesh)
    finally:
        close_mesh(mesh)
    return 0


def _run(request: ToolRequest[HarnessFlags], mesh: Any) -> None:
    """Opens the checkpoint, runs the tasks, and writes and prints the results of rank 0."""
    from megatron.inference.loaded_model import open_checkpoint
    from megatron.parallel.agreement import run_on_first
    from trident.evaluate.harness import harness_model, run_harness

    flags, given = request.flags, dict(request.given)
    if flags.eval_fp32:
        given |= {"precision.bf16": False, "precision.fp16": False}
    loaded = open_checkpoint(flags.load, given, mesh)
    micro_batch_size = given.get("optim.micro_batch_size", loaded.config.optim.micro_batch_size)
    model = harness_model(loaded, micro_batch_size * flags.micro_bs_multiplier)
    names = [name.strip() for name in flags.task_list.split(",") if name.strip()]
    results: dict[str, Any] = {}
    groups = [[name] for name in names] if flags.intermed_results else [names]
    for group in groups:
        for key, part in run_harness(
            model,
            mesh,
            group,
            include_path=flags.include_path,
            num_fewshot=flags.num_fewshot,
            limit=flags.limit,
            bootstrap_iters=flags.bootstrap_iters,
        ).items():
            results.setdefault(key, {}).update(part)
        run_on_first(mesh, lambda: _write(Path(flags.results_path), results))
    log.line(json.dumps(results["results"], indent=2))


def _write(path: Path, results: dict[str, Any]) -> None:
    """Writes the results, over an older file."""
    from megatron.files.replacing import write_atomically

    text = json.dumps(results, indent=4) + "\n"
    write_atomically(path, text.encode())


if __name__ == "__main__":
    process_exit.exit_with(main)
