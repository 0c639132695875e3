"""GPT2-ALL-IN's benchmarks of a checkpoint, next to closed-form baselines.

    python benchmark.py --task wikitext103 --model logs/gentle_lovelace-26112211 --dev
    python benchmark.py --task benchmark_all --model checkpoints/gpt2

The output, the figures and five mistakes of each task, is also in logs/benchmark/TIME.log, and as JSON next to it. The
tasks read the small files of examples/evaluation unless --data names another, or --tasks a list of tasks as
docs/evaluation.md describes it. Flags of pretrain_gpt.py may follow; tools/evaluate.py does the work.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.gpt2_all_in.flags import checkpoints_of
from megatron import log, process_exit
from megatron.config import PathUse, flag
from megatron.config.program_flags import ProgramFlags, read_program
from megatron.parallel.rank_start import begin_rank

_ALL = "benchmark_all"
_HERE = Path(__file__).resolve().parent
_ITEMS = _HERE.parent / "evaluation"
# The kind of task and the shipped items of each name.
_TASKS = {
    "lambada": ("lambada", _ITEMS / "passages.jsonl"),
    "cbt": ("cloze", _ITEMS / "cloze.jsonl"),
    "wikitext103": ("perplexity", _ITEMS / "text.txt"),
}
_DEV_ITEMS = 100


@dataclass(frozen=True)
class BenchmarkFlags(ProgramFlags):
    """Flags of this program."""

    task: str = flag(_ALL, "what is measured", choices=(_ALL, *_TASKS))
    model: str = flag(help="folder of checkpoints or of a run, or the name of a run in logs", path=PathUse.FOLDER)
    data: str | None = flag(None, "file of the task, for example wiki.test.tokens", path=PathUse.PREFIX)
    tasks: str | None = flag(
        None, f"file of tasks for {_ALL}; unset, one with the names of the others", path=PathUse.SMALL_FILE
    )
    train_data: str | None = flag(
        None, "text, jsonl or token file that the unigram and bigram baselines are fitted to; if unset, the token file "
        "that the model was trained on", path=PathUse.PREFIX,
    )  # fmt: skip
    dev: bool = flag(False, f"only the first {_DEV_ITEMS} items")
    log_dir: str = flag("logs/benchmark", "folder of the logs", path=PathUse.FOLDER)

    def problems(self) -> Iterator[str]:
        """Rules between the flags."""
        if self.data is not None and self.task == _ALL:
            yield f"--data {self.data} is the file of one task. Name the task: --task {', '.join(_TASKS)}."
        if self.tasks is not None and self.task != _ALL:
            yield f"--tasks {self.tasks} is for --task {_ALL}, and --task {self.task} is one. Drop one of them."

    def trainer_arguments(self) -> list[str]:
        """The command line of tools/evaluate.py."""
        limit = ["--limit", str(_DEV_ITEMS)] if self.dev else []
        fitted = ["--train-data", self.train_data] if self.train_data is not None else []
        arguments = ["--load", str(checkpoints_of(self.model)), *limit, *fitted]
        if self.task == _ALL:
            return [*arguments, "--tasks", self.tasks or str(_HERE / "benchmarks.yaml")]
        kind, items = _TASKS[self.task]
        data = str(self.data or items)
        published = ["detokenizer=wikitext"] if kind == "perplexity" and "wiki" in Path(data).name else []
        return [*arguments, "--task", kind, "--data", data, "--set", f"name={self.task}", *published]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmarks."""
    begin_rank()
    flags, others = read_program(BenchmarkFlags, sys.argv[1:] if argv is None else argv, "benchmark.py", __doc__ or "")
    arguments = flags.trainer_arguments()

    from tools import evaluate

    trained_on = None if "--train-data" in arguments else _training_data(Path(arguments[arguments.index("--load") + 1]))
    fitted = ["--train-data", trained_on] if trained_on else []
    path = Path(flags.log_dir, "benchmark.log")  # of ranks that write nothing; they take part in checking the folder
    if log.is_first_rank():
        path = new_log(path.parent)
        log.copy_to(str(path))
    try:
        return evaluate.main([*arguments, *fitted, "--output", str(path.with_suffix(".json")), *others])
    finally:
        log.copy_to(None)


def new_log(folder: Path) -> Path:
    """Makes an empty log named by the time; programs that start within one second get different names."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        path = folder / f"{stem if number == 1 else f'{stem}-{number}'}.log"
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            break
    return path


def _training_data(checkpoints: Path) -> str | None:
    """The token file that a checkpoint's run was trained on, if it was a single one and is still there."""
    from megatron.checkpoint import newest_record
    from megatron.config import RunConfig
    from megatron.parallel.mesh import ParallelMesh

    found = newest_record(checkpoints, ParallelMesh.single())
    if found is None:
        return None
    data = RunConfig.from_json(found.record["config"]).data
    sources = data.data_path or data.train_data_path
    return sources[0] if len(sources) == 1 and Path(f"{sources[0]}.idx").is_file() else None


if __name__ == "__main__":
    process_exit.exit_with(main)
