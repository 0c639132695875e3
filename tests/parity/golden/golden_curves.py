"""Loss curves of a tiny run in six layouts and three precisions, trained where arithmetic is the same on every CPU.

`python -m tests.parity.golden.golden_curves OUTPUT [LAYOUT ...]` trains the first steps and writes a JSON object;
`--write` trains all and writes the golden files beside this one. The program sets what must be set before PyTorch is
loaded, and its ranks inherit it.

float16 is not among the precisions: it does not train on CPUs. The third one is bfloat16 whose gradients are
accumulated in bfloat16 too, as a DeepSpeed file may ask; it differs from the second in nothing else.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent
STEPS = 8
TRAINED_STEPS = 5  # those that a test trains again: warmup, decay, and the optimizer's moments are among them
REPEATED_STEPS = 3
REPEATED = "bf16"  # trained twice in every layout
# The oldest code paths of ATen and MKL, which every x86-64 CPU has.
ENVIRONMENT = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2-zero1": (2, {"zero_stage": 1}),
    "dp2-zero3": (2, {"zero_stage": 3}),
    "tp2-pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}
Curve = list[tuple[float, float]]  # loss and gradient norm of each step


def precisions(folder: Path) -> dict[str, list[str]]:
    """The flags of every precision."""
    path = folder / "bf16_accumulation.json"
    path.write_text(json.dumps({"data_types": {"grad_accum_dtype": "bf16"}}))
    return {"fp32": [], "bf16": ["--bf16"], "bf16-accumulated-in-bf16": ["--bf16", "--deepspeed_config", str(path)]}


def train_runs(rank: int, runs: list[list[str]], folder: Path) -> None:
    """Trains one command line after the other on this rank; the ranks of each meet at a port of its own."""
    import torch

    from tests.helpers.tiny_run import train_here

    folder.mkdir(exist_ok=True)

    torch.backends.mkldnn.set_flags(False)  # oneDNN chooses its kernels by the CPU, whatever it is told
    for number, flags in enumerate(runs):
        os.environ["MASTER_PORT"] = _port(rank, folder / f"port{number}")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            code, text = train_here(rank, flags)
        if code != 0:
            raise RuntimeError(f"exit code {code}: {text}\n{said.getvalue()}")


def _port(rank: int, path: Path) -> str:
    """A port that rank 0 found free just now."""
    from tests.helpers.ranks import free_port

    if rank == 0:
        path.with_suffix(".new").write_text(str(free_port()))
        path.with_suffix(".new").rename(path)
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


def train_all(folder: Path, steps: int, layouts: Sequence[str] = tuple(LAYOUTS)) -> dict[str, dict[str, Curve]]:
    """The first steps of the curves by layout and precision; of the repeated one a few again, under its name with
    `-again`.
    """
    from megatron.observe.metrics_file import read_steps
    from tests.helpers.ranks import run_ranks
    from tests.helpers.tiny_run import write_tiny_corpus

    corpus = write_tiny_corpus(folder)
    flags = precisions(folder)
    flags[f"{REPEATED}-again"] = flags[REPEATED]
    found: dict[str, dict[str, Curve]] = {}
    for layout in layouts:
        ranks, changes = LAYOUTS[layout]
        runs = [
            corpus.flags(
                *more, run_dir=folder / layout / name, train_iters=STEPS, global_batch_size=8, micro_batch_size=1,
                eval_iters=0, exit_interval=REPEATED_STEPS if name.endswith("-again") else steps, **changes,
            )
            for name, more in flags.items()
        ]  # fmt: skip
        run_ranks(train_runs, ranks, runs, folder / layout)
        found[layout] = {
            name: [(step["lm_loss"], step["gradient_norm"]) for step in read_steps(folder / layout / name).values()]
            for name in flags
        }
    return found


def golden_text(curves: dict[str, Curve]) -> str:
    """One layout as a golden file: each number as people read it, and exactly."""
    exact = {
        name: [{"loss": [loss, loss.hex()], "gradient_norm": [norm, norm.hex()]} for loss, norm in curve]
        for name, curve in curves.items()
        if not name.endswith("-again")
    }
    lines = [
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"    {json.dumps(step)}" for step in curve) + "\n  ]"
        for name, curve in exact.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_golden(layout: str) -> dict[str, Curve]:
    """The curves of a layout as they are kept."""
    kept = json.loads((GOLDEN / f"{layout}.json").read_text())
    return {
        name: [tuple(float.fromhex(step[key][1]) for key in ("loss", "gradient_norm")) for step in curve]  # type: ignore[misc]
        for name, curve in kept.items()
    }


def main(words: list[str]) -> None:
    """Trains all and writes what was found to a file, or the golden files."""
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.parity.golden.golden_curves", *words],
            os.environ | ENVIRONMENT,
        )
    with tempfile.TemporaryDirectory() as folder:
        writes = words == ["--write"]
        found = train_all(Path(folder), *((STEPS,) if writes else (TRAINED_STEPS, words[1:] or tuple(LAYOUTS))))
    if not writes:
        Path(words[0]).write_text(json.dumps(found))
        return
    for layout, curves in found.items():
        (GOLDEN / f"{layout}.json").write_text(golden_text(curves))


if __name__ == "__main__":
    main(sys.argv[1:])
