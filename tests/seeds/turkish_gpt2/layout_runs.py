"""Eight layouts of one tiny run through the real program, and a checkpoint that three of them continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import ExitCode
from megatron.observe.metrics_file import read_steps
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, train_here, write_tiny_corpus

# tensor, pipeline and data-parallel size
LAYOUTS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2))
SAVING = (2, 2, 1)
LOADING = ((1, 1, 1), (1, 2, 2), (2, 1, 2))
SAVED_AT, STEPS = 5, 10
Layout = tuple[int, int, int]


@dataclass(frozen=True)
class LayoutRuns:
    """What each run logged, by layout and step."""

    trained: dict[Layout, dict[int, dict]]
    continued: dict[Layout, dict[int, dict]]


def run_layouts(folder: Path) -> LayoutRuns:
    """Trains every layout from scratch, and three on from the checkpoint of a fourth.

    Runs of as many ranks are made one after another by the same processes.
    """
    corpus = write_tiny_corpus(folder)
    folders = {layout: folder / "x".join(map(str, layout)) for layout in LAYOUTS}
    for ranks in (4, 1, 2, 8):  # the checkpoint is written by four
        found = [layout for layout in LAYOUTS if _ranks(layout) == ranks]
        runs = [_flags(corpus, layout, folders[layout]) for layout in sorted(found, key=lambda one: one != SAVING)]
        runs += [_continuation(corpus, layout, folders) for layout in LOADING if _ranks(layout) == ranks]
        _train(ranks, runs)
    return LayoutRuns(
        {layout: read_steps(folders[layout] / "run") for layout in LAYOUTS},
        {layout: read_steps(folders[layout] / "continued") for layout in LOADING},
    )


def train_in_turn(rank: int, runs: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
    """Trains several runs in the same process."""
    return [train_here(rank, flags) for flags in runs]


def _train(ranks: int, runs: Sequence[Sequence[str]]) -> None:
    for outcomes in run_ranks(train_in_turn, ranks, runs, timeout_seconds=300):
        assert outcomes == [(ExitCode.DONE, "")] * len(runs), outcomes


def _ranks(layout: Layout) -> int:
    tp, pp, dp = layout
    return tp * pp * dp


def _flags(corpus: TinyCorpus, layout: Layout, folder: Path, **changes: object) -> list[str]:
    tp, pp, _ = layout
    saves = {"save": folder / "checkpoints", "save_interval": SAVED_AT} if layout == SAVING else {}
    named = {
        "run_dir": folder / "run",
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "train_iters": STEPS,
        "global_batch_size": 4,
        "hidden_dropout": 0,
        "attention_dropout": 0,
        "eval_iters": 0,
        **saves,
        **changes,
    }
    return corpus.flags(**named)


def _continuation(corpus: TinyCorpus, layout: Layout, folders: dict[Layout, Path]) -> list[str]:
    checkpoint = folders[SAVING] / "checkpoints" / f"iter_{SAVED_AT:07d}"
    return _flags(corpus, layout, folders[layout], load=checkpoint, run_dir=folders[layout] / "continued")
