"""Ranks of a corpus job: results in rank order, and one failure for all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.errors import DataError
from trident.corpus.workers.ranks import JobError, JobRanks


def with_peers(*answers: Any) -> JobRanks:
    """Rank 0 of a job whose other ranks give these answers."""
    return JobRanks(0, 1 + len(answers), lambda value: json.loads(json.dumps([value, *answers])))


def test_results_come_in_rank_order() -> None:
    ranks = with_peers([None, "b"], [None, "c"])
    assert ranks.run_on_all(lambda: "a") == ["a", "b", "c"]
    assert ranks.run_on_first(lambda: "a") == "a"
    assert JobRanks.single().run_on_all(lambda: 5) == [5]


def test_only_rank_0_runs_what_is_run_on_first() -> None:
    ranks = JobRanks(1, 2, lambda value: [[None, "from rank 0"], value])
    assert ranks.run_on_first(lambda: pytest.fail("rank 1 ran it")) == "from rank 0"


def test_the_failure_of_another_rank_keeps_its_type_and_names_the_rank() -> None:
    with pytest.raises(DataError, match=r"^rank 1: in.jsonl:7 is bad$"):
        with_peers([["DataError", "in.jsonl:7 is bad"], None]).run_on_all(lambda: 1)


def test_a_failure_without_a_type_of_its_own_is_a_job_error() -> None:
    with pytest.raises(JobError, match=r"^rank 1: OSError: gone$"):
        with_peers([["OSError", "gone"], None]).run_on_all(lambda: 1)


def test_other_ranks_receive_this_ranks_failure() -> None:
    told: list[Any] = []

    def gather(value: Any) -> list[Any]:
        told.append(value)
        return [value, [None, None]]

    with pytest.raises(ZeroDivisionError):
        JobRanks(0, 2, gather).run_on_all(lambda: 1 // 0)
    assert told == [[("ZeroDivisionError", "integer division or modulo by zero"), None]]
