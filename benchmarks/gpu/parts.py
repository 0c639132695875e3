"""The parts of a page: what each runs, and how long it may take."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from benchmarks.gpu.context import Context


@dataclass(frozen=True)
class Part:
    """A part: the function that measures it, as module and name, and its time limit in seconds."""

    module: str
    function: str
    seconds: float

    def run(self, context: Context) -> None:
        """Runs it in this process; its modules are imported only now, since they take seconds."""
        getattr(importlib.import_module(f"benchmarks.gpu.{self.module}"), self.function)(context)


# Two scripts of five and a half minutes each, for a GPU that is there for a quarter of an hour: the first decides the
# goals of speed and shows where the time goes, the second measures what explains it.
SCRIPTS = {"first": "ready,124m,1.3b,llama1b", "second": "ops,head,124m-4096,fp8"}
SCRIPT_MINUTES = 5.5

# In the order in which they run, so that nine minutes hold what matters most: what everything else needs with tests
# of what is new, then the promised speed at the usual length, all tests, what explains the speed, and the rest. On one
# H100 (2026-11-28) the build took 34 s, three contenders 54 s (124M) and 81 s (1.3B), and torch.compile of Llama more
# than a minute where its cache was empty.
PARTS = {
    "build": Part("programs", "build_kernels", 120),
    "ready": Part("ready", "get_ready", 110),
    "124m": Part("training", "measure_model", 80),
    "1.3b": Part("training", "measure_model", 110),
    "llama1b": Part("training", "measure_model", 150),
    "tests": Part("programs", "run_tests", 240),
    "ops": Part("bandwidth", "measure_operations", 240),
    "head": Part("head", "measure_head", 60),
    "fp8": Part("training", "measure_float8", 170),
    "ring": Part("ring", "measure_ring", 60),
    "trace": Part("trace", "measure_trace", 90),
    "124m-4096": Part("training", "measure_model", 110),
    "1.3b-4096": Part("training", "measure_model", 170),
    "llama1b-4096": Part("training", "measure_model", 170),
    "355m": Part("training", "measure_model", 170),
    "345m-fp16": Part("block", "train_the_block", 120),
    "experts": Part("experts", "measure_experts", 150),
    "zero": Part("training", "measure_zero", 180),
    "sanitizer": Part("programs", "sanitize", 400),
}
