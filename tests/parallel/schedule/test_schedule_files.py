"""Schedules as CSV: both ways, in torch's own form too, and what is said of a file that cannot run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.config.sections.pipelines import SCHEDULE_CHUNKS, is_schedule_file
from megatron.errors import ConfigError
from megatron.parallel.schedule.building import build_schedule, forward_programs
from megatron.parallel.schedule.schedule_files import read_orders, schedule_text
from tests.helpers.pipeline_programs import Execution

GOOD = "0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize("name", SCHEDULE_CHUNKS)
def test_what_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    schedule = build_schedule(name, 3, SCHEDULE_CHUNKS[name][0], 5)
    path = tmp_path / "schedule.csv"
    path.write_text(schedule_text(schedule))
    read = build_schedule(str(path), 3, schedule.chunks_per_rank, 5)
    assert (read.actions, read.placement) == (schedule.actions, schedule.placement)
    assert (read.bubble_ratio, read.peak_alive) == (schedule.bubble_ratio, schedule.peak_alive)
    for micro_batches in (1, 4, 7):
        programs = forward_programs(str(path), 3, schedule.chunks_per_rank, micro_batches)
        assert sum(not action.kind.is_message for program in programs for action in program) == (
            schedule.placement.chunks * micro_batches
        )
        Execution(programs, read.placement, seed=0).run(sends_wait=True)


def test_passes_without_gradients_of_named_schedules_are_those_of_the_schedule() -> None:
    assert forward_programs("zbv", 2, 2, 3) == build_schedule("zbv", 2, 2, 3).forward_only()


@pytest.mark.parametrize("end", [" , ", '","'])
def test_pauses_blanks_and_quotes_mean_nothing(tmp_path: Path, end: str) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(GOOD.replace(",", end) + "\n,,\n")
    placement, micro_batches, orders = read_orders(str(path))
    assert (placement.owners, micro_batches, [len(order) for order in orders]) == ((0, 1), 2, [4, 4])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0G0\n", "'0G0' in the row of rank 0 is not a computation. Write chunk, F, B"),
        ("0SEND_F0\n", "'0SEND_F0' in the row of rank 0 is not a computation"),
        ("\n,,\n", "it has no computations"),
        ("0F0,0B0\r0F1,0B1\r", "chunk 0 is in the rows of ranks 0 and 1"),
        ("0" * 200_000 + "\n", "in the row of rank 0 is not a computation"),
        ("0F0,0B0\n0F1,0B1\n", "chunk 0 is in the rows of ranks 0 and 1"),
        ("0F0,0B0\n2F0,2B0\n", "chunk 1 of 0 to 2 is missing"),
        ("0F0,0B0,2F0,2B0\n1F0,1B0\n", "rank 1 has 1 chunk and rank 0 has 2"),
        (
            "1F0,1B0\n0F0,0B0\n",
            "the first chunk, 0, is on rank 1 and the last, 1, on rank 0. Put chunk 0 in the first row",
        ),
        (
            "0F0,0B0\n1F0,1B0\n3F0,3B0\n2F0,2B0\n",
            "the first chunk, 0, is on rank 0 and the last, 3, on rank 2. Put chunk 0 in the first row, and chunk 3 in "
            "the first row or the last.",
        ),
        (GOOD.replace("0B1", "0B0"), "0B0 is written 2 times"),
        (GOOD.replace("0B1", ""), "chunk 0 has F for micro-batch 1. It needs F and either B"),
        (GOOD.replace("1B1", "1I1"), "chunk 1 has F, I for micro-batch 1"),
        (GOOD.replace("0F1,", "").replace("0B1", ""), "chunk 0 has nothing for micro-batch 1"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            "the schedule deadlocks: 0B0 on rank 0 waits for 1B0, which comes after 1F1 on rank 1; 1F1 on rank 1 "
            "waits for 0F1, which comes after 0B0 on rank 0. Change the order of one of these ranks.",
        ),
        (GOOD + "2F0,2B0,2F1,2B1\n", "is for 3 ranks (--pipeline-model-parallel-size 2)"),
        ("0F0,0B0,0F1,0B1,2F0,2B0,2F1,2B1\n1F0,1B0,1F1,1B1,3F0,3B0,3F1,3B1\n", "is for 2 chunks per rank"),
        ("0F0,0B0\n1F0,1B0\n", "is for 1 micro-batch (a step has 2: --global-batch-size)"),
    ],
)
def test_a_file_that_cannot_run_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        build_schedule(str(path), 2, 1, 2)
    assert str(caught.value).startswith(f"--pipeline-schedule {path}")


def test_torch_reads_what_is_written() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for row in schedule_text(build_schedule("zbv", 2, 2, 3)).splitlines():
        for cell in row.split(","):
            assert str(schedules._Action.from_str(cell)) == cell


def test_a_file_is_known_by_how_its_name_ends() -> None:
    assert is_schedule_file("mine.csv") and is_schedule_file("MINE.CSV")
    assert not is_schedule_file("zbv") and not is_schedule_file(None)
