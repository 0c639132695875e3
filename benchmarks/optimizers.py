"""Optimizers on the demo corpus at equal compute: the best rate of each, then several seeds.

    python benchmarks/optimizers.py --output docs/optimizers.png

Every run is `pretrain_gpt.py` in this process with the same network, batches and number of steps. The rate of an
optimizer is chosen with the first seed; the figures are its validation losses with all seeds, and the processor time of
a run, since the steps of two optimizers do not take the same. The rate falls to a tenth along a cosine, but that of
schedule-free stays.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pretrain_gpt
from benchmarks.figures import print_figure, quickstart_data
from examples.kill_and_resume import Demo, DemoFlags
from megatron import process_exit
from megatron.config import ConfigSection, PathUse, flag, parse_flags
from megatron.config.sections.optimizers import SCHEDULE_FREE
from megatron.observe.metrics_file import read_records

Course = Mapping[int, float]  # validation loss after a step


@dataclass(frozen=True)
class OptimizerFlags(ConfigSection):
    """Flags of this program."""

    optimizers: tuple[str, ...] = flag(("adam", "muon", "schedule-free"), "optimizers, with flags", nargs="+")
    rates: tuple[float, ...] = flag((0.003, 0.01, 0.03), "learning rates to choose from", nargs="+", above=0)
    seeds: tuple[int, ...] = flag((1, 2, 3), "seeds of the weights", nargs="+", at_least=1)
    steps: int = flag(240, "steps of a run", at_least=8)
    data: str | None = flag(
        None, "folder with the data of examples/quickstart.sh; prepared if unset", path=PathUse.FOLDER
    )
    output: str | None = flag(None, "file for the curves, such as curves.png (pip install matplotlib)")


@dataclass(frozen=True)
class Outcome:
    """A run: its validation losses, and the seconds that processors worked for it."""

    losses: Course
    cpu_seconds: float

    @property
    def last(self) -> float:
        """The loss after the last step."""
        return self.losses[max(self.losses)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything, prints the figures and draws the curves."""
    flags = parse_flags(OptimizerFlags, sys.argv[1:] if argv is None else argv, prog="optimizers.py",
                        description=__doc__ or "")  # fmt: skip
    found: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        demo = quickstart_data(work) if flags.data is None else Demo(DemoFlags(), Path(flags.data), work)
        for optimizer in flags.optimizers:
            first = {rate: train(demo, optimizer, rate, flags.seeds[0], flags.steps) for rate in flags.rates}
            best = min(first, key=lambda rate, known=first: known[rate].last)
            for rate, outcome in first.items():
                _print("loss of a rate", [outcome], optimizer=optimizer, lr=rate)
            others = [train(demo, optimizer, best, seed, flags.steps) for seed in flags.seeds[1:]]
            found[optimizer] = [first[best], *others]
            _print("loss with the best rate", found[optimizer], optimizer=optimizer, lr=best)
    if flags.output:
        draw(found, flags.output)
    return 0


def train(demo: Demo, optimizer: str, rate: float, seed: int, steps: int) -> Outcome:
    """Trains once."""
    run = demo.run / f"{optimizer}-{rate}-{seed}".replace(" ", "-")
    name, *flags = optimizer.split()
    decay = "constant" if name == SCHEDULE_FREE else "cosine"
    pairs = {
        **{"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 64},
        **{"max-position-embeddings": 64, "micro-batch-size": 16, "global-batch-size": 16, "train-iters": steps},
        **{"lr": rate, "min-lr": rate / 10, "lr-decay-style": decay, "lr-warmup-iters": steps // 12},
        **{"weight-decay": 0.1, "adam-beta2": 0.95, "optimizer": name, "seed": seed, "split": "90,10,0"},
        **{"hidden-dropout": 0, "attention-dropout": 0, "eval-interval": max(1, steps // 12), "eval-iters": 8},
        **{"run-dir": run, "data-path": demo.data / "demo_text_document", "data-cache-path": demo.run / "cache"},
        **{"vocab-file": demo.data / "demo-vocab.json", "merge-file": demo.data / "demo-merges.txt"},
    }
    begin = time.process_time()
    with contextlib.redirect_stdout(sys.stderr):
        words = [str(word) for name, value in pairs.items() for word in (f"--{name}", value)]
        pretrain_gpt.main([*words, *flags])
    seconds = time.process_time() - begin
    records = [record for record in read_records(run) if record.get("kind") == "evaluation"]
    return Outcome({record["iteration"]: record["lm_loss"] for record in records}, seconds)


def _print(figure: str, outcomes: Sequence[Outcome], **more: object) -> None:
    last = [outcome.last for outcome in outcomes]
    print_figure("optimizers", figure, fmean(last), "nats per token", spread=(min(last), max(last)),
                 cpu_seconds=round(fmean(outcome.cpu_seconds for outcome in outcomes), 1), **more)  # fmt: skip


def draw(found: Mapping[str, Sequence[Outcome]], path: str) -> None:
    """Draws the mean of the seeds over the steps, and what lies between them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    for optimizer, outcomes in found.items():
        steps = sorted(outcomes[0].losses)
        columns = [[outcome.losses[step] for outcome in outcomes] for step in steps]
        panel.plot(steps, [fmean(column) for column in columns], label=optimizer)
        panel.fill_between(steps, [min(column) for column in columns], [max(column) for column in columns], alpha=0.3)
    panel.set(xlabel="steps", ylabel="validation loss, nats per token")
    panel.legend()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    process_exit.exit_with(main)
