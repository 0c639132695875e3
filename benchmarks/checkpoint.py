"""Stall and total time of saves: synchronous, in the background, and with torch's distributed checkpoints.

    python benchmarks/checkpoint.py

Prints one JSON line per measurement, for a state of 100 MB and one of 1 GB (float32 weights and both moments of AdamW).
A run trains a GPT with one thread; between steps it saves in four ways in turns: ours at once
(`--no-async-save`) and in the background, and `torch.distributed.checkpoint` with `save` and `async_save`, both with
their defaults. All write the same tensors to the same file system and sync them. `stall` is the time in which no step
advances: the call, and for ours in the background what the update of the next step waits for the copy.
`total` ends when the checkpoint is complete, while steps are trained. `step_beside` is the time of steps that began
while one was being written in the background, in times of those before it.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure, quickstart_data
from examples.kill_and_resume import Demo
from megatron import process_exit
from megatron.config import ConfigSection, RunRequest, flag, parse, parse_flags

if TYPE_CHECKING:
    from megatron.train.callback import CallbackList
    from megatron.train.run import Run

# Layers and width, by the size of the state in megabytes.
SIZES = {"100": (8, 256), "1000": (11, 768)}


@dataclass(frozen=True)
class CheckpointFlags(ConfigSection):
    """Flags of this program."""

    megabytes: str = flag("all", "size of the state", choices=("all", *SIZES))
    rounds: int = flag(5, "saves of each kind", at_least=2)
    micro_batch_size: int = flag(1, "samples of 256 tokens in a step", at_least=1)
    work_dir: str | None = flag(None, "folder to save in; on the file system that is measured")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures both sizes and prints the figures."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = parse_flags(CheckpointFlags, words, prog="checkpoint.py", description=__doc__ or "")
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")

    from megatron.train.build import open_run

    with tempfile.TemporaryDirectory(dir=flags.work_dir) as name:
        demo = quickstart_data(Path(name))
        for megabytes in SIZES if flags.megabytes == "all" else (flags.megabytes,):
            folder = Path(name) / megabytes
            with open_run(training_config(demo, folder, megabytes, flags)) as (run, callbacks):
                found, size_bytes = in_turns(run, callbacks, folder, flags.rounds)
            print_figures(found, size_bytes)
    return 0


def training_config(demo: Demo, folder: Path, megabytes: str, flags: CheckpointFlags) -> RunRequest:
    """A GPT whose state has the size, on the data of quickstart, saved in a folder."""
    layers, width = SIZES[megabytes]
    changes = {
        **{"num-layers": layers, "hidden-size": width, "num-attention-heads": width // 64, "seq-length": 256},
        **{"max-position-embeddings": 256, "micro-batch-size": flags.micro_batch_size, "train-iters": 1000},
        **{"global-batch-size": flags.micro_batch_size, "hidden-dropout": 0, "attention-dropout": 0},
        **{"save": folder / "checkpoints", "load": folder / "checkpoints", "run-dir": folder / "run"},
    }
    words = [*demo.training_flags("run"), *(word for name, value in changes.items() for word in (f"--{name}", value))]
    return parse([*map(str, words), "--async-save"])


def in_turns(run: Run, callbacks: CallbackList, folder: Path, rounds: int) -> tuple[dict[str, list[float]], int]:
    """Seconds by name of the figure, after one round that is not counted; and the bytes of the state."""
    import torch

    from megatron.engine.state import owned_bytes

    torch.set_num_threads(1)
    ways = saving_ways(run, callbacks, folder)
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for name, way in list(ways.items())[:: 1 if number % 2 else -1]:
            before = statistics.median(train_step(run) for _ in range(3))
            stall, total, beside = way()
            for saved in (*folder.glob("checkpoints/iter_*"), folder / "theirs"):
                shutil.rmtree(saved, ignore_errors=True)
            if number:
                found[f"{name}_stall"].append(stall)
                found[f"{name}_total"].append(total)
                found[f"{name}_step_beside"] += [seconds / before for seconds in beside]
    return found, owned_bytes(run.engine)


def saving_ways(
    run: Run, callbacks: CallbackList, folder: Path
) -> dict[str, Callable[[], tuple[float, float, list[float]]]]:
    """The ways of saving; each returns the seconds of the stall, of the save, and of the steps during it."""
    import torch.distributed.checkpoint as theirs

    from megatron.engine.state import owned_pieces
    from megatron.train.callbacks.saving import Saving

    (saving,) = (each for each in callbacks if isinstance(each, Saving))
    writer = saving.writer
    if writer is None:
        raise RuntimeError("the run does not save in the background")

    def at_once() -> tuple[float, float, list[float]]:
        saving.writer = None
        seconds = timed(lambda: saving.save(run))
        saving.writer = writer
        return seconds, seconds, []

    def in_background() -> tuple[float, float, list[float]]:
        before, began_at = writer.stall_seconds, time.perf_counter()
        saving.save(run)
        beside = []
        while (outcome := writer.take_outcome()) is None:
            beside.append(train_step(run))
        if outcome.failure is not None:
            raise outcome.failure
        total = min(time.perf_counter() - began_at, outcome.seconds)
        stall = writer.stall_seconds - before
        saving.note_outcome(run)
        return stall, total, beside

    def state() -> dict[str, Any]:
        return {f"{key.name} {key.kind}": tensor for key, tensor in owned_pieces(run.engine)}

    def theirs_at_once() -> tuple[float, float, list[float]]:
        seconds = timed(lambda: theirs.save(state(), checkpoint_id=str(folder / "theirs")))
        return seconds, seconds, []

    def theirs_in_background() -> tuple[float, float, list[float]]:
        began_at = time.perf_counter()
        future: Any = theirs.async_save(state(), checkpoint_id=str(folder / "theirs"))
        stall = time.perf_counter() - began_at
        ended: list[float] = []
        future.add_done_callback(lambda _: ended.append(time.perf_counter()))
        beside = []
        while not future.done():
            beside.append(train_step(run))
        future.result()
        return stall, ended[0] - began_at, beside

    return {
        "ours_at_once": at_once,
        "ours_in_background": in_background,
        "torch_save": theirs_at_once,
        "torch_async_save": theirs_in_background,
    }


def train_step(run: Run) -> float:
    """Seconds of a step of training."""
    return timed(lambda: _train(run))


def _train(run: Run) -> None:
    step = run.engine.train_batch(run.train_batches(), 1e-4)
    run.progress = run.progress.after(step.sample_count, step.sample_count * run.config.data.seq_length)


def timed(work: Callable[[], Any]) -> float:
    """Seconds that work takes."""
    began_at = time.perf_counter()
    work()
    return time.perf_counter() - began_at


def print_figures(found: dict[str, list[float]], size_bytes: int) -> None:
    """Medians with the smallest and the largest, and the stalls in times of a save at once."""
    more = {"state_bytes": size_bytes}
    for name, values in found.items():
        if values:
            unit = "times a step" if name.endswith("beside") else "s"
            spread = (min(values), max(values))
            print_figure("checkpoint", name, statistics.median(values), unit, spread=spread, **more)
    for name, base in (("ours_in_background", "ours_at_once"), ("torch_async_save", "torch_save")):
        shares = [stall / whole for stall, whole in zip(found[f"{name}_stall"], found[f"{base}_total"], strict=True)]
        spread = (min(shares), max(shares))
        print_figure("checkpoint", f"{name}_stall_ratio", statistics.median(shares), "ratio", spread=spread, **more)
    ratios = [ours / other for ours, other in zip(found["ours_at_once_total"], found["torch_save_total"], strict=True)]
    spread = (min(ratios), max(ratios))
    print_figure("checkpoint", "at_once_ratio_to_torch", statistics.median(ratios), "ratio", spread=spread, **more)


if __name__ == "__main__":
    process_exit.exit_with(main)
