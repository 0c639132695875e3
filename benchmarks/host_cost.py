"""Host cost of a step: operations and processor time of a network so small that nothing else counts.

    python benchmarks/host_cost.py

Prints one JSON line per figure, for each width, precision, ZeRO stage and number of micro-batches: our whole step
(reading the batch, DeepSpeed, the loss of the step) and plain PyTorch (one attention call, fused AdamW, clipping; in
bf16 torch's autocast) in turns in one process per combination, with one thread. A step is split into what comes before
(reading, moving the batch to the device), forward, backward and what comes after it: the work of autograd ends
"backward". Operations are those that torch dispatches; hooks that DeepSpeed has in the backward pass count as after it
in the operations, but their time as backward. `waits` are reads of a value, for which the host would wait on a GPU.
Times are of the processor, since on a shared machine wall time measures the others' load; ten steps at a time, since
the first ones of a round find the caches as the other program left them, which no training run meets. ZeRO 0 exists
in fp32 only. `--profile 20` shows in which functions the time of our steps goes instead.
"""

from __future__ import annotations

import cProfile
import itertools
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.config import ConfigSection, flag, parse, parse_flags

FP32, BF16 = "fp32", "bf16"
OURS, PLAIN = "ours", "plain"


@dataclass(frozen=True)
class HostFlags(ConfigSection):
    """Flags of this program."""

    rounds: int = flag(15, "rounds of each", at_least=2)
    steps: int = flag(10, "steps per round", at_least=1)
    layers: int = flag(12, "blocks of the network", at_least=1)
    widths: tuple[int, ...] = flag((8, 64), "widths of the network", nargs="+")
    tokens: int = flag(32, "tokens of a micro-batch", at_least=2)
    dtypes: tuple[str, ...] = flag((FP32, BF16), "precisions", nargs="+")
    zero_stages: tuple[int, ...] = flag((0, 1, 2, 3), "stages of ZeRO", nargs="+")
    micro_batches: tuple[int, ...] = flag((1, 8), "numbers of micro-batches per step", nargs="+")
    kernels: str | None = flag(None, "implementations of operations in our step, as pretrain_gpt.py takes them")
    profile: int = flag(0, "steps of ours whose functions are shown, instead of measuring")


class Case(NamedTuple):
    """The configurations measured together."""

    width: int
    dtype: str
    zero_stage: int
    micro_batches: int


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every combination and prints the figures."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(HostFlags, words, prog="host_cost.py", description=__doc__ or "")
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    every = itertools.product(flags.widths, flags.dtypes, flags.zero_stages, flags.micro_batches)
    cases = [case for case in itertools.starmap(Case, every) if case.dtype == FP32 or case.zero_stage > 0]
    if len(cases) == 1:
        with tempfile.TemporaryDirectory() as folder:
            measure(flags, cases[0], Path(folder))
        return 0
    rest = _without(words, ("--widths", "--dtypes", "--zero-stages", "--micro-batches"))
    for case in cases:  # DeepSpeed's ZeRO-3 changes torch for the rest of the process
        chosen = ("--widths", case.width, "--dtypes", case.dtype, "--zero-stages", case.zero_stage)
        more = [str(word) for word in (*chosen, "--micro-batches", case.micro_batches)]
        subprocess.run([sys.executable, __file__, *rest, *more], check=True)
    return 0


def _without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The words of a command line without some flags and their values."""
    kept, is_kept = [], True
    for word in words:
        if word.startswith("--"):
            is_kept = word.partition("=")[0] not in flags
        if is_kept:
            kept.append(word)
    return kept


def measure(flags: HostFlags, case: Case, folder: Path) -> None:
    """Prints the figures of one combination."""
    import torch

    from benchmarks.step_phases import PHASES, OperationCounter, StepPhases

    torch.set_num_threads(1)
    phases = StepPhases()
    with steps_of(flags, case, folder, phases) as steps, phases.following():
        if flags.profile:
            show_profile(steps[OURS], flags.profile)
            return
        seconds = in_turns(flags, steps, phases)
        counters = {}
        for name, step in steps.items():
            counter = OperationCounter(phases)
            phases.start()
            with counter.counting():
                step()
            counters[name] = counter
    settings: dict[str, Any] = {
        **case._asdict(),
        "layers": flags.layers,
        "tokens": flags.tokens,
        **({"kernels": flags.kernels} if flags.kernels else {}),
    }
    for name in steps:
        for phase in PHASES:
            print_figure("host_cost", f"{name}_operations_{phase}", counters[name].of_phase(phase), "", **settings)
            times = [1000 * step[phase] for step in seconds[name]]
            print_figure("host_cost", f"{name}_{phase}", statistics.median(times), "ms", **settings)
        waits = sum(counters[name].waits.values())
        print_figure("host_cost", f"{name}_waits", waits, "", **settings)
    print_figure(
        "host_cost", "waits_after_backward", sum(counters[OURS].waits_of_phase(PHASES[-1]).values()), "", **settings
    )
    for figure, parts in (("step", PHASES), ("forward_and_backward", PHASES[1:3])):
        sums = {name: [sum(step[phase] for phase in parts) for step in seconds[name]] for name in steps}
        ratios = [ours / plain for ours, plain in zip(sums[OURS], sums[PLAIN], strict=True)]
        spread = (min(ratios), max(ratios))
        ratio = statistics.median(ratios)
        print_figure("host_cost", f"ratio_{figure}", ratio, "plain PyTorch", spread=spread, **settings)


def in_turns(
    flags: HostFlags, steps: Mapping[str, Callable[[], None]], phases: Any
) -> dict[str, list[dict[str, float]]]:
    """Processor time of the phases of each round, per step; the first round of each is a warm-up and is not counted."""
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    for turn in range(flags.rounds + 1):
        for name, step in list(steps.items())[:: 1 if turn % 2 else -1]:
            total: dict[str, float] = {}
            for _ in range(flags.steps):
                phases.start()
                step()
                for phase, spent in phases.finish().items():
                    total[phase] = total.get(phase, 0.0) + spent / flags.steps
            if turn:
                seconds[name].append(total)
    return seconds


@contextmanager
def steps_of(flags: HostFlags, case: Case, folder: Path, phases: Any) -> Iterator[dict[str, Callable[[], None]]]:
    """A step of ours and one of plain PyTorch on the same number of tokens, which announce their phases."""
    import torch
    import torch.nn.functional as F

    from benchmarks.gpu.runs import corpus_flags, training
    from benchmarks.plain_gpt import PlainGPT
    from benchmarks.training_loop import TrainingLoop

    words = [
        *corpus_flags(folder / "data", 256, 8192),
        *("--num-layers", str(flags.layers), "--hidden-size", str(case.width)),
        *("--num-attention-heads", str(max(1, case.width // 32)), "--attention-dropout", "0", "--hidden-dropout", "0"),
        *("--seq-length", str(flags.tokens), "--max-position-embeddings", str(flags.tokens)),
        *("--micro-batch-size", "1", "--global-batch-size", str(case.micro_batches)),
        *("--train-iters", "100000", "--eval-iters", "0", "--lr", "3e-4", "--lr-decay-style", "constant"),
        *("--zero-stage", str(case.zero_stage), "--run-dir", tempfile.mkdtemp(dir=folder)),
        *(["--kernels", flags.kernels] if flags.kernels else []),
        *(["--bf16"] if case.dtype == BF16 else []),
    ]
    linear = F.linear
    with training(parse(words)) as (run, step):
        autocast = torch.bfloat16 if case.dtype == BF16 else None
        loop = TrainingLoop(PlainGPT(run.config.model), run.config.optim, torch.float32, autocast=autocast)
        loop.on_phase = run.engine.on_phase = phases.enter
        batches = run.train_batches()

        def plain() -> None:
            replaced, F.linear = F.linear, linear  # by DeepSpeed, in ZeRO-3
            loop.step(batches, 3e-4)
            F.linear = replaced

        yield {OURS: step, PLAIN: plain}


def show_profile(step: Callable[[], None], count: int) -> None:
    """Prints the functions in which the time of some steps goes, by their own time and by that of what they call."""
    step()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(count):
        step()
    profile.disable()
    for order in ("tottime", "cumulative"):
        pstats.Stats(profile).sort_stats(order).print_stats(60)


if __name__ == "__main__":
    process_exit.exit_with(main)
