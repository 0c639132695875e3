"""Plans a run: which layout of a network on so many devices is the fastest that fits. Or compares pipeline schedules.

    python tools/runs/plan.py --model-preset llama-3-70b --devices 512 --device h100 --global-batch-size 1024
    python tools/runs/plan.py --pipeline-model-parallel-size 4 --micro-batches 8
    python tools/runs/plan.py --pipeline-schedule zbv --draw zbv.svg
    python tools/runs/plan.py --pipeline-schedule mine.csv

A plan takes any of the trainer's flags; those of the layout are kept as given. Without --devices, schedules are listed.
Their times are those of forward passes and halves of backward passes that take equally long, and of messages that take
none.
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

    pipeline_model_parallel_size: int = flag(4, "stages the layers are spread over", at_least=1, at_most=1024)
    micro_batches: int = flag(
        8, "micro-batches of a step: global batch / (micro-batch x replicas)", at_least=1, at_most=65_536
    )
    virtual_pipeline_model_parallel_size: int | None = flag(
        None, "chunks of the network on each rank; as few as the schedule takes if unset", at_least=1, at_most=1024
    )
    pipeline_schedule: str | None = flag(None, f"{', '.join(SCHEDULE_CHUNKS)} or FILE.csv")
    draw: str | None = flag(None, "SVG file to draw the schedule in", path=PathUse.NEW_FILE)
    csv: str | None = flag(None, "CSV file to write the schedule to, for --pipeline-schedule", path=PathUse.NEW_FILE)
    devices: int | None = flag(None, "devices to plan a run for", at_least=1, at_most=1_048_576)

    def trainer_arguments(self) -> list[str]:
        """The flags of a plan that the trainer has as well."""
        names = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "pipeline_schedule")
        given = {f"--{name.replace('_', '-')}": getattr(self, name) for name in names if name in self.given}
        return arguments_of({**given, "--planned-devices": self.devices})

    def problems(self) -> Iterator[str]:
        for name, path in (("--draw", self.draw), ("--csv", self.csv)):
            if path is not None and self.pipeline_schedule is None:
                yield f"{name} {path} needs --pipeline-schedule: which one it is about. Give one."


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a plan, the table of schedules, or the drawing of one of them, and writes the files that are asked for."""
    words = sys.argv[1:] if argv is None else argv
    flags, others = read_program(PlanFlags, words, prog="plan.py", description=__doc__ or "")
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
    """Prints the table of schedules, or one of them, and writes it."""
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
    held = held_text(schedule.peak_alive, schedule.chunks_per_rank)
    print(f"activations held, in micro-batches of a stage, by rank: {held}")
    for path, text in ((flags.draw, svg), (flags.csv, schedule_text)):
        if path is not None:
            write_atomically(Path(path), text(schedule).encode())
            print(path)
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
