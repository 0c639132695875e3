"""Load of the experts of a small network after 500 steps, for each balancing method.

    python benchmarks/expert_balance.py

Prints one JSON line per figure and run, and then their means over the seeds: `largest_load` is the tokens of the
busiest expert of each layer relative to an even load, mean over the layers and over the last tenth of the steps; `loss`
the language-model loss over the same steps. The data are those of the quickstart; the runs of a seed differ in the
balancing alone.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure, quickstart_data
from examples.kill_and_resume import Demo
from megatron import process_exit
from megatron.config import ConfigSection, flag, parse_flags
from megatron.observe.metrics_file import read_steps

ROOT = Path(__file__).resolve().parent.parent
FORMS = {
    "none": "--moe-router-load-balancing-type none",
    "micro_batch": "--moe-aux-loss-coeff 0.01",
    "sample": "--moe-aux-loss-coeff 0.01 --moe-aux-loss-scope sample",
    "global": "--moe-aux-loss-coeff 0.01 --moe-aux-loss-scope global",
    "bias": "--moe-router-enable-expert-bias",
}


@dataclass(frozen=True)
class BalanceFlags(ConfigSection):
    """Flags of this program."""

    steps: int = flag(500, "steps of each run", at_least=10)
    num_experts: int = flag(8, "experts", at_least=2)
    topk: int = flag(2, "experts per token", at_least=1)
    seeds: int = flag(3, "runs of each, with other seeds", at_least=1)
    at_once: int = flag(1, "runs at the same time", at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains a network with each way of balancing and prints the measurements."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(BalanceFlags, words, prog="expert_balance.py", description=__doc__ or "")
    settings = {"steps": flags.steps, "experts": flags.num_experts, "topk": flags.topk}
    means: dict[tuple[str, str], list[float]] = {}
    runs = list(itertools.product(range(1, flags.seeds + 1), FORMS))
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(flags.at_once) as pool:
        demo = quickstart_data(Path(name))
        for (seed, form), records in zip(runs, pool.map(lambda run: trained(demo, flags, *run), runs), strict=True):
            last = records[-max(1, flags.steps // 10) :]
            for figure, values in {
                "largest_load": [record["routing"]["mean_largest_load"] for record in last],
                "loss": [record["lm_loss"] for record in last],
            }.items():
                means.setdefault((form, figure), []).append(statistics.mean(values))
                spread = (min(values), max(values))
                _print(figure, statistics.mean(values), spread, **settings, balancing=form, seed=seed)
    for (form, figure), values in means.items():
        spread = (min(values), max(values))
        _print(figure, statistics.mean(values), spread, **settings, balancing=form, seeds=flags.seeds)
    return 0


def _print(figure: str, value: float, spread: tuple[float, float], **more: object) -> None:
    print_figure(
        "expert_balance", figure, value, "ratio" if figure == "largest_load" else "nats", spread=spread, **more
    )


def trained(demo: Demo, flags: BalanceFlags, seed: int, form: str) -> list[dict[str, Any]]:
    """The records of the steps of one run."""
    run_dir = demo.run / f"{form}-{seed}"
    sizes = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64 "
        f"--num-experts {flags.num_experts} --moe-router-topk {flags.topk} --moe-ffn-hidden-size 64 --swiglu "
        f"--micro-batch-size 2 --global-batch-size 8 --train-iters {flags.steps} --lr 2e-3 --lr-decay-style cosine "
        f"--lr-warmup-iters {flags.steps // 20} --clip-grad 1.0 --hidden-dropout 0 --attention-dropout 0 "
        f"--eval-iters 0 --log-interval 100 --split 100,0,0 --seed {seed}"
    )
    command = [sys.executable, ROOT / "pretrain_gpt.py", *sizes.split(), *FORMS[form].split(), "--run-dir", run_dir]
    command += ["--data-path", demo.data / "demo_text_document", *demo.tokenizer_flags]
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr)
    return list(read_steps(run_dir / "metrics.jsonl").values())


if __name__ == "__main__":
    process_exit.exit_with(main)
