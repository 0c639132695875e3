"""The same GPT-2 trained by our engine and by a plain JAX loop: tokens per second, time of a step, and the losses.

    python benchmarks/torch_beside_jax.py --model tiny --steps 50

Both begin with the same weights and see the same batches (dropout 0, AdamW, clipping, a linear schedule, float32), and
take their steps in turns in one process that may use --threads cores. Seconds are those of the processor, since on a
shared machine wall time measures the others' load. The first steps, in which JAX compiles, are not timed. Needs the
package `jax` (the extra `jax`).
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.config import ConfigSection, RunRequest, flag, parse, parse_flags

if TYPE_CHECKING:
    from benchmarks.plain_jax_gpt import JaxLoop
    from megatron.train.run import Run

# layers, width, heads, sequence length, samples of a step, vocabulary
SIZES = {"tiny": (2, 32, 4, 32, 4, 512), "small": (4, 256, 8, 128, 8, 2048)}
_LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class CompareFlags(ConfigSection):
    """Flags of this program."""

    model: str = flag("tiny", "size of the network", choices=tuple(SIZES))
    steps: int = flag(50, "steps of each", at_least=4)
    untimed_steps: int = flag(3, "first steps that are not timed", at_least=1)
    threads: int = flag(1, "cores that both may use", at_least=1)


@dataclass
class Course:
    """The losses and the processor seconds of one side's steps."""

    losses: list[float]
    seconds: list[float]


def main(argv: Sequence[str] | None = None) -> int:
    """Trains both and prints the measurements."""
    description = __doc__ or ""
    flags = parse_flags(CompareFlags, sys.argv[1:] if argv is None else argv, "torch_beside_jax.py", description)
    if hasattr(os, "sched_setaffinity"):  # XLA sizes its thread pool by it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: flags.threads])
    os.environ.update(OMP_NUM_THREADS=str(flags.threads), DS_ACCELERATOR="cpu", JAX_PLATFORMS="cpu")
    with tempfile.TemporaryDirectory() as name:
        ours, theirs = compare(flags, Path(name))
    print_courses(flags, ours, theirs)
    return 0


def compare(flags: CompareFlags, folder: Path) -> tuple[Course, Course]:
    """Trains both step by step in turns: ours, JAX."""
    import torch

    from megatron.config.schedule import learning_rate
    from megatron.train.build import open_run

    torch.set_num_threads(flags.threads)
    ours, theirs = Course([], []), Course([], [])
    with open_run(training_request(flags, folder)) as (run, _):
        loop = jax_loop(run)
        for _ in range(flags.steps):
            rate = learning_rate(run.config.optim, run.progress.consumed_samples)
            (batch,) = run.train_batches()
            if batch is None:
                raise RuntimeError("a single stage reads every batch")
            began = time.process_time()
            step = run.engine.train_batch([batch], rate)
            ours.losses.append(step.loss)
            between = time.process_time()
            theirs.losses.append(loop.step(batch.tokens, batch.labels, rate))
            ended = time.process_time()
            ours.seconds.append(between - began)
            theirs.seconds.append(ended - between)
            run.progress = run.progress.after(step.sample_count, step.sample_count * run.config.data.seq_length)
    return ours, theirs


def jax_loop(run: Run) -> JaxLoop:
    """The JAX side, with the weights that the run begins with."""
    from benchmarks.plain_jax_gpt import JaxLoop, Settings

    model, optim = run.config.model, run.config.optim
    weights = {name: value.detach().numpy().copy() for name, value in run.engine.stack.named_parameters()}
    return JaxLoop(
        weights,
        Settings(
            layers=model.num_layers,
            heads=model.num_attention_heads,
            beta1=optim.adam_beta1,
            beta2=optim.adam_beta2,
            eps=optim.adam_eps,
            weight_decay=optim.weight_decay,
            clip=optim.clip_grad,
        ),
    )


def training_request(flags: CompareFlags, folder: Path) -> RunRequest:
    """Our side of the comparison, on token files that are made in a folder."""
    layers, width, heads, length, batch, vocabulary = SIZES[flags.model]
    files = write_data(folder, vocabulary, tokens=(flags.steps + 1) * batch * length)
    values: dict[str, Any] = {
        "num-layers": layers, "hidden-size": width, "num-attention-heads": heads, "seq-length": length,
        "max-position-embeddings": length, "micro-batch-size": batch, "global-batch-size": batch,
        "hidden-dropout": 0, "attention-dropout": 0, "lr": _LEARNING_RATE, "train-iters": flags.steps,
        "eval-iters": 0, "split": "1,0,0", "log-interval": 1_000_000, "run-dir": folder / "run", "num-workers": 0,
        **files,
    }  # fmt: skip
    return parse([word for name, value in values.items() for word in (f"--{name}", str(value))])


def write_data(folder: Path, vocabulary: int, tokens: int) -> dict[str, str]:
    """Writes a vocabulary, and documents that count upwards with gaps, so that there is something to learn.

    Returns:
        the flags that name them.
    """
    import numpy as np

    from megatron.data.formats.indexed_writer import IndexedWriter
    from trident.corpus.vocabulary.learning import save_byte_level_vocabulary, train_byte_level

    sources = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    files = save_byte_level_vocabulary(str(folder / "demo"), *train_byte_level(sources, vocabulary))
    drawn = np.random.default_rng(1)
    with IndexedWriter(str(folder / "counting"), np.uint16) as writer:
        for _ in range(tokens // 100 + 1):
            start, gap = drawn.integers(256), drawn.integers(1, 4)
            writer.add_document([(start + gap * np.arange(100)) % 256])
    return {"data-path": str(folder / "counting"), "vocab-file": str(files[0]), "merge-file": str(files[1])}


def print_courses(flags: CompareFlags, ours: Course, theirs: Course) -> None:
    """Prints a JSON line per figure."""
    _, _, _, length, batch, _ = SIZES[flags.model]
    settings = {"model": flags.model, "steps": flags.steps, "tokens_per_step": batch * length, "threads": flags.threads}
    for name, course in (("ours", ours), ("jax", theirs)):
        timed = course.seconds[flags.untimed_steps :]
        middle = statistics.median(timed)
        spread = (1e3 * min(timed), 1e3 * max(timed))
        rate = batch * length / middle if middle else 0.0
        print_figure("torch_beside_jax", f"{name}_tokens_per_second", rate, "tokens/s", **settings)
        print_figure("torch_beside_jax", f"{name}_step", 1e3 * middle, "ms", spread=spread, **settings)
        print_figure("torch_beside_jax", f"{name}_final_loss", course.losses[-1], "nats", **settings)
    difference = max(abs(one - other) for one, other in zip(ours.losses, theirs.losses, strict=True))
    print_figure("torch_beside_jax", "largest_difference_of_losses", 1e6 * difference, "1e-6 nats", **settings)


if __name__ == "__main__":
    process_exit.exit_with(main)
