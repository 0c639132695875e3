"""The program with a fault: `python -m campaigns.kills.faulty_run FAULT FLAG ...`.

FAULT is JSON: the kind of fault, the rank, the phase and step in which it strikes, and a file for the time of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pretrain_gpt
from megatron import process_exit
from megatron.data.loader import MicroBatches
from megatron.errors import DataError
from megatron.parallel import joining
from megatron.parallel.mesh import ParallelMesh
from megatron.train import build, run_data
from megatron.train.start_up import engine_opening
from megatron.train.watchdog import Watch


def strike(fault: dict[str, Any]) -> None:
    """Executes the fault once and notes the time."""
    Path(fault["note"]).write_text(str(time.time()))
    kind = fault["kind"]
    if kind in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    elif kind == "exit":
        os._exit(9)
    elif kind == "error":
        raise DataError("sample 7 is damaged")
    elif kind == "bug":
        raise ZeroDivisionError("a bug")
    elif kind == "sleep":
        time.sleep(1000)
    elif kind == "hold":
        ctypes.PyDLL(None).sleep(1000)  # keeps the interpreter lock
    while kind == "spin":
        pass


def install(fault: dict[str, Any]) -> None:
    """Lets the fault strike on its rank, when a phase of a step is entered, or in start-up, or in the data loader."""
    if fault["phase"] == "join":
        joining.timedelta = lambda minutes: timedelta(seconds=fault["hang_seconds"])  # type: ignore[assignment, misc]
    if int(os.environ["RANK"]) != fault["rank"]:
        return
    if fault["phase"] == "init":
        real_build = engine_opening.build_engine

        def build_engine(config: Any, mesh: ParallelMesh, freezing: Any) -> Any:
            strike(fault)
            return real_build(config, mesh, freezing)

        engine_opening.build_engine = build_engine
    elif fault["phase"] == "join":
        real_init = joining.dist.init_process_group

        def init_process_group(*words: Any, **named: Any) -> None:
            strike(fault)
            real_init(*words, **named)

        joining.dist.init_process_group = init_process_group
    elif fault["phase"] in ("load", "index"):
        module: Any
        module, name = {"load": (build, "load_tensors"), "index": (run_data, "build_split_datasets")}[fault["phase"]]
        real_work = getattr(module, name)

        def work(*words: Any, **named: Any) -> Any:
            strike(fault)
            return real_work(*words, **named)

        setattr(module, name, work)
    elif fault["phase"] == "loader":
        real_batch = MicroBatches._batch

        def batch(self: MicroBatches, first: int) -> Any:
            if first >= fault["step"] * 4:
                strike(fault)
            return real_batch(self, first)

        MicroBatches._batch = batch  # type: ignore[method-assign]
    else:
        real_enter = Watch.enter

        def enter(self: Watch, phase: str, step: int | None = None) -> None:
            real_enter(self, phase, step)
            if phase == fault["phase"] and self._position.step == fault["step"] and not Path(fault["note"]).exists():
                strike(fault)

        Watch.enter = enter  # type: ignore[method-assign]


def main() -> int:
    """Runs the program with the fault."""
    install(json.loads(sys.argv[1]))
    return pretrain_gpt.main(sys.argv[2:])


if __name__ == "__main__":
    process_exit.exit_with(main)
