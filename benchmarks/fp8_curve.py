"""Losses of training with emulated FP8 products, compared with bfloat16 and float32, on the demo corpus.

    python benchmarks/fp8_curve.py

Every run is `pretrain_gpt.py` in this process with the same seed and the same batches. The difference of two runs is
that of their mean losses over the last tenth of the steps: single steps of two runs differ by chance as well.
"""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
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
from megatron.observe.metrics_file import read_records, read_steps

REFERENCE = "bf16"
EMULATED = ("--bf16", "--fp8-emulation", "--fp8-format")
RUNS: Mapping[str, tuple[str, ...]] = {
    REFERENCE: ("--bf16",),
    "float32": (),
    "tensorwise": (*EMULATED, "hybrid"),
    "rowwise": (*EMULATED, "hybrid", "--fp8-recipe", "rowwise"),
    "e4m3": (*EMULATED, "e4m3"),
    "ends-bf16": (*EMULATED, "hybrid", "--first-last-layers-bf16"),
}


@dataclass(frozen=True)
class CurveFlags(ConfigSection):
    """Flags of this program."""

    runs: tuple[str, ...] = flag(tuple(RUNS), f"runs besides {REFERENCE}", nargs="+", choices=tuple(RUNS))
    steps: int = flag(200, "steps of a run", at_least=2)
    num_layers: int = flag(4, "transformer blocks", at_least=3)
    hidden_size: int = flag(64, "width of the network, a multiple of 64", at_least=64)
    lr: float = flag(0.003, "peak learning rate", above=0)
    seed: int = flag(1, "seed of the weights", at_least=1)
    data: str | None = flag(
        None, "folder with the data of examples/quickstart.sh; prepared if unset", path=PathUse.FOLDER
    )


@dataclass(frozen=True)
class Curve:
    """A run: the loss of every step, and that of the validation data after the last."""

    losses: Sequence[float]
    validation: float


def main(argv: Sequence[str] | None = None) -> int:
    """Trains every run and prints how far it is from the reference."""
    flags = parse_flags(CurveFlags, sys.argv[1:] if argv is None else argv, prog="fp8_curve.py",
                        description=__doc__ or "")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        demo = quickstart_data(work) if flags.data is None else Demo(DemoFlags(), Path(flags.data), work)
        curves = {name: train(demo, flags, name) for name in dict.fromkeys((REFERENCE, *flags.runs))}
    reference = curves[REFERENCE]
    last = math.ceil(flags.steps / 10)
    for name, curve in curves.items():
        pairs = list(zip(curve.losses, reference.losses, strict=True))
        print_figure("fp8_curve", "training loss", fmean(curve.losses[-last:]), "nats per token", of=name, steps=last)
        print_figure("fp8_curve", "validation loss", curve.validation, "nats per token", of=name)
        if name != REFERENCE:
            own, known = (fmean(part[-last:]) for part in zip(*pairs, strict=True))
            print_figure("fp8_curve", "difference of training losses", 100 * (own / known - 1), "%", of=name)
            largest = max((a / b - 1 for a, b in pairs), key=abs)
            print_figure("fp8_curve", "largest difference of a step", 100 * largest, "%", of=name)
            difference = 100 * (curve.validation / reference.validation - 1)
            print_figure("fp8_curve", "difference of validation losses", difference, "%", of=name)
    return 0


def train(demo: Demo, flags: CurveFlags, name: str) -> Curve:
    """Trains once."""
    run = demo.run / name
    pairs = {
        **{"num-layers": flags.num_layers, "hidden-size": flags.hidden_size, "num-attention-heads": 4},
        **{"seq-length": 64, "max-position-embeddings": 64, "micro-batch-size": 16, "global-batch-size": 16},
        **{"train-iters": flags.steps, "lr": flags.lr, "min-lr": flags.lr / 10, "lr-decay-style": "cosine"},
        **{"lr-warmup-iters": flags.steps // 10, "weight-decay": 0.1, "adam-beta2": 0.95, "seed": flags.seed},
        **{"hidden-dropout": 0, "attention-dropout": 0, "split": "90,10,0", "eval-interval": flags.steps},
        **{"eval-iters": 8, "log-interval": 1, "run-dir": run, "data-path": demo.data / "demo_text_document"},
        **{"data-cache-path": demo.run / "cache", "vocab-file": demo.data / "demo-vocab.json"},
        "merge-file": demo.data / "demo-merges.txt",
    }
    with contextlib.redirect_stdout(sys.stderr):
        pretrain_gpt.main([*(str(word) for pair in pairs.items() for word in (f"--{pair[0]}", pair[1])), *RUNS[name]])
    losses = [step["lm_loss"] for step in read_steps(run).values()]
    evaluations = [record["lm_loss"] for record in read_records(run) if record.get("kind") == "evaluation"]
    return Curve(losses, evaluations[-1])


if __name__ == "__main__":
    process_exit.exit_with(main)
