"""Plans a run: finds the fastest layout that fits a number of devices. Also compares pipeline schedules.

    python tools/runs/plan.py --model-preset llama-3-70b --devices 512 --device h100 --global-batch-size 1024
    python tools/runs/plan.py --pipeline-model-parallel-size 4 --micro-batches 8
    python tools/runs/plan.py --pipeline-schedule zbv --draw zbv.svg
    python tools/runs/plan.py --pipeline-schedule mine.csv

A plan accepts any of the trainer's flags; given flags of the layout are kept. Without --devices, schedules are listed,
with times that assume equal forward passes and halves of backward passes, and no communication time.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import process_exit
from megatron.config import PathUse, flag
from megatron.config.program_flags import ProgramFlags, arguments_of, read_program
from megatron.config.sections.pipelines import SCHEDULE_CHUNKS, is_schedule_file


@dataclass(frozen=True)
class PlanFlags(ProgramFlags):
    """Flags of this program."""

    pipeline_model_parallel_size: int = flag(4, "degree of pipeline parallelism", at_least=1, at_most=1024)
    micro_batches: int = flag(
        8,
        "micro-batches per step: global batch size / (micro-batch size x data-parallel size)",
        at_least=1,
        at_most=65_536,
    )
    virtual_pipeline_model_parallel_size: int | None = flag(
        None, "model chunks per rank; the minimum of the schedule if unset", at_least=1, at_most=1024
    )
    pipeline_schedule: str | None = flag(None, f"pipeline schedule: {', '.join(SCHEDULE_CHUNKS)} or FILE.csv")
    draw: str | None = flag(None, "SVG file for a drawing of the schedule", path=PathUse.NEW_FILE)
    csv: str | None = flag(None, "CSV file for the schedule, to use with --pipeline-schedule", path=PathUse.NEW_FILE)
    devices: int | None = flag(None, "number of devices to plan a run for", at_least=1, at_most=1_048_576)

    def trainer_arguments(self) -> list[str]:
        """The flags of a plan that the trainer shares."""
        names = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "pipeline_schedule")
        given = {f"--{name.replace('_', '-')}": getattr(self, name) for name in names if name in self.given}
        return arguments_of({**given, "--planned-devices": self.devices})

    def problems(self) -> Iterator[str]:
        for name, path in (("--draw", self.draw), ("--csv", self.csv)):
            if path is not None and self.pipeline_schedule is None:
                yield f"{name} {path} requires --pipeline-schedule. Add it."


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a plan, the table of schedules, or the drawing of a schedule, and writes the requested files."""
    arguments = sys.argv[1:] if argv is None else argv
    flags, others = read_program(PlanFlags, arguments, prog="plan.py", description=__doc__ or "")
    if flags.devices is None:
        return show_schedules(flags)
    from megatron.config.parse import read_flags
    from megatron.config.run_sections import DEFAULT
    from trident.plan.requests import request_lines

    provenance = read_flags([*flags.trainer_arguments(), *others]).run.provenance
    is_chosen = any(provenance[f"precision.{name}"] != DEFAULT for name in ("fp16", "bf16"))
    precision = [] if is_chosen else ["--bf16"]
    trainer = [*precision, *flags.trainer_arguments(), *others]
    for line in request_lines(trainer, ["pretrain_gpt.py", *precision, *others]):
        print(line)
    return 0


def show_schedules(flags: PlanFlags) -> int:
    """Prints the table of schedules, or prints and writes one of them."""
    from megatron.files.replacing import write_atomically
    from megatron.parallel.schedule.schedule_files import schedule_text
    from tools.runs.schedule_comparison import held_text, schedule_of_file, schedule_with_sizes, table_lines
    from tools.runs.schedule_drawing import svg, text_lines

    names = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "micro_batches")
    sizes = [getattr(flags, name) for name in names]
    if flags.pipeline_schedule is None:
        for line in table_lines(*sizes):
            print(line)
        return 0
    if is_schedule_file(flags.pipeline_schedule):
        given = [size if name in flags.given else None for name, size in zip(names, sizes, strict=True)]
        schedule = schedule_of_file(flags.pipeline_schedule, *given)
    else:
        schedule = schedule_with_sizes(flags.pipeline_schedule, *sizes)
    for line in text_lines(schedule, shutil.get_terminal_size().columns, in_color=sys.stdout.isatty()):
        print(line)
    memory = held_text(schedule.peak_alive, schedule.chunks_per_rank)
    print(f"activations held, in micro-batches of a stage, by rank: {memory}")
    for path, text in ((flags.draw, svg), (flags.csv, schedule_text)):
        if path is not None:
            write_atomically(Path(path), text(schedule).encode())
            print(path)
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
