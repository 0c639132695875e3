"""Failures of several ranks: described, rebuilt, and the same one raised on all of them."""

from __future__ import annotations

import json

import pytest

from megatron.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ExitCode,
    FailureReport,
    LaunchError,
    MegatronError,
    StorageError,
    describe_failure,
    joined,
    printable,
    raise_on_all_ranks,
    rebuild_failure,
)

KINDS = (ConfigError, DataError, StorageError)


class Damage(DataError):
    """A kind of its own below one that is known."""


def test_a_failure_is_described_as_the_nearest_known_type() -> None:
    assert describe_failure(StorageError("disk full"), KINDS) == ("StorageError", "disk full")
    assert describe_failure(Damage("bit 3"), KINDS) == ("DataError", "bit 3")
    assert describe_failure(Damage("bit 3"), (*KINDS, Damage)) == ("Damage", "bit 3")
    assert describe_failure(ZeroDivisionError("by zero"), KINDS) == ("ZeroDivisionError", "by zero")


def test_a_described_failure_is_rebuilt_after_json() -> None:
    report = json.loads(json.dumps(FailureReport("DataError", "in.jsonl:7 is bad")))
    rebuilt = rebuild_failure(report, KINDS, MegatronError, "rank 2: ")
    assert type(rebuilt) is DataError and str(rebuilt) == "rank 2: in.jsonl:7 is bad"
    unknown = rebuild_failure(["KeyError", "'a'"], KINDS, StorageError)
    assert type(unknown) is StorageError and str(unknown) == "KeyError: 'a'"


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_raises_the_failure_of_highest_precedence(rank: int) -> None:
    failures = [None, StorageError("disk full"), DataError("line 3"), DataError("line 9")]
    reports = [None if failure is None else describe_failure(failure, KINDS) for failure in failures]
    with pytest.raises(DataError, match=r"^line 3$" if rank == 2 else r"^rank 2: line 3$") as caught:
        raise_on_all_ranks(reports, rank, failures[rank], KINDS, StorageError)
    assert (caught.value is failures[rank]) == (rank == 2)


def test_an_unknown_type_has_the_precedence_of_the_fallback() -> None:
    reports = [FailureReport("StorageError", "full"), FailureReport("KeyError", "'a'")]
    with pytest.raises(DataError, match="^rank 1: KeyError: 'a'$"):
        raise_on_all_ranks(reports, 0, None, KINDS, DataError)
    with pytest.raises(StorageError, match="^rank 0: full$"):
        raise_on_all_ranks(reports, 1, None, KINDS, MegatronError)


def test_an_interrupt_is_raised_as_it_is() -> None:
    reports = [FailureReport("KeyboardInterrupt", ""), FailureReport("DataError", "line 3")]
    with pytest.raises(KeyboardInterrupt):
        raise_on_all_ranks(reports, 0, KeyboardInterrupt(), KINDS, StorageError)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("name", "'name'"),
        ("a\x1b]0;b\x07\n", r"'a\x1b]0;b\x07\n'"),
        ("\u202e\ud800\x9b", r"'\u202e\ud800\x9b'"),
        ("x" * 1000, "'" + "x" * 196 + "..."),
        (2**62, "4611686018427387904"),
        (None, "None"),
        ([0] * 10**6, "[0, 0, 0, 0, 0, 0, ...]"),
        ({"a": {"b": ["\x1b"]}}, r"{'a': {'b': ['\x1b']}}"),
    ],
)
def test_values_of_files_are_shown_short_and_escaped(value: object, shown: str) -> None:
    assert printable(value) == shown


def test_a_problem_that_repeats_a_huge_value_keeps_its_beginning_and_its_end() -> None:
    problem = f"--load-tag {'a' * 60_000} does not contain a step. Expected iter_0000500."
    (shown,) = ConfigError(problem).problems
    assert len(shown) < 5000
    assert shown.startswith("--load-tag aaa") and shown.endswith("does not contain a step. Expected iter_0000500.")
    assert ConfigError(["short", problem]).problems == ["short", shown]


def test_several_failures_are_one_error_with_each_line_once() -> None:
    lost, damaged, wrong = StorageError("no disk"), DataError("no data\nand none there"), ConfigError(["flag", "other"])
    assert joined([lost]).exit_code == ExitCode.STORAGE
    both = joined([lost, damaged, DataError("no data")])
    assert (type(both), str(both)) == (DataError, "no disk\nno data\nand none there")
    flags = joined([damaged, wrong, LaunchError("flag")])
    assert (type(flags), str(flags)) == (ConfigError, "no data\nand none there\nflag\nother")
    assert type(joined([LaunchError("a"), LaunchError("b")])) is LaunchError
    assert type(joined([CheckpointError("a"), CheckpointError("b")])) is CheckpointError
    assert type(joined([CheckpointError("a"), lost])) is StorageError
