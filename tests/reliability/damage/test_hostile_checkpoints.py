"""Checkpoints made to do harm: nothing is executed, followed or loaded, and none takes much time or memory.

By hand: `python -m tests.reliability.damage.hostile_checkpoints` (all payloads, with their cost) and
`python -m tests.reliability.fuzzing.fuzz_checkpoints` (manifests and records with their digests computed anew).
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.reliability.damage import hostile_checkpoints
from tests.reliability.damage.hostile_checkpoints import STEPS, Outcome, run, use, write_directory
from tests.reliability.damage.hostile_payloads import PAYLOADS, Place, write_sealed
from tests.reliability.fuzzing.fuzz import Cases, Fuzzing, run_case
from tests.reliability.fuzzing.fuzz_checkpoints import MUTATIONS, TARGETS, read_checkpoint, write_checkpoint

# The payloads that leave the newest checkpoint as it is: what lies beside it makes no difference.
BESIDE = (
    "step link to", "step file", "step FIFO", "step aside", "step temporary", "step trash", "hint", "lock", "run.json",
    "pickle model", "pickle protocol", "pickle torch", "pickle .", "pickle as hint", "pickle as lock",
    "pickle as run.json", "pickle as history", "modules", "package", "auto_map", "crowd", "name with",
)  # fmt: skip


def is_beside(name: str) -> bool:
    return name.startswith(BESIDE) or name == "zip slip"


def test_there_are_enough_payloads() -> None:
    assert len(PAYLOADS) >= 100
    assert sum(map(is_beside, PAYLOADS)) < len(PAYLOADS) / 2


def run_elsewhere(rank: int, names: list[str]) -> list[Outcome]:
    """Tries payloads in a process that is small, since each of them takes two forks of it."""
    return run(names)


def test_no_payload_does_anything(pytestconfig: pytest.Config) -> None:
    """A quarter of the payloads, all of them with `--cases 10000`; the limits are many times what they take."""
    share = 4 if pytestconfig.getoption("--cases") < 10_000 else 1
    names = list(PAYLOADS)[pytestconfig.getoption("--fuzz-seed") % share :: share]
    (outcomes,) = run_ranks(run_elsewhere, 1, names, timeout_seconds=600)
    assert [outcome.name for outcome in outcomes] == ["nothing", *names]
    for outcome in outcomes:
        assert outcome.wrong == "", outcome
        assert outcome.loaded == (2 if outcome.name == "nothing" or is_beside(outcome.name) else 1), outcome
        assert outcome.seconds < 20 and outcome.peak_bytes < 512 << 20, outcome


def place_in(folder: Path) -> Place:
    write_directory(folder)
    return Place(folder / "run", folder / "outside", folder / "outside" / "canary")


def test_whoever_unpickles_makes_the_canary(tmp_path: Path) -> None:
    """The pickles are loaded guns; only this test fires one."""
    place = place_in(tmp_path)
    PAYLOADS["pickle torch zip"](place)
    torch.load(place.newest / "pytorch_model.bin", weights_only=False)
    assert place.canary.exists()


def test_what_a_payload_does_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_in(tmp_path)
    assert use("nothing", place).wrong == ""
    for what, work in (
        ("it was executed", lambda directory: place.canary.write_text("x")),
        ("something outside was changed", lambda directory: (place.outside / "secret").write_text("x")),
        ("escapes are shown", lambda directory: print("\x1b[2J")),
        ("ZeroDivisionError", lambda directory: 1 / 0),
    ):
        monkeypatch.setitem(STEPS, "find", work)
        assert what in use("nothing", place).wrong
    monkeypatch.setattr(hostile_checkpoints, "PAYLOADS", {"bad": lambda place: 1 / 0})
    with pytest.raises(RuntimeError, match="the payload bad could not be made: its process ended with 1"):
        run(["bad"])
    assert Outcome("x", "").peak_bytes == 0


def test_manifests_and_records_with_digests_that_fit(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """A sample of them; `python -m tests.reliability.fuzzing.fuzz_checkpoints --case N` plays a failure again."""
    count, seed = pytestconfig.getoption("--cases") // 8, pytestconfig.getoption("--fuzz-seed")
    undamaged, fuzzing = tmp_path / "undamaged", Fuzzing()
    undamaged.mkdir()
    write_checkpoint(undamaged)
    cases = Cases(undamaged, seed, targets=TARGETS)
    for number in range(count):
        fuzzing.count(run_case(cases, number, tmp_path))
    slow = [failure for failure in fuzzing.failures if "of processor time" in failure["text"]]
    assert [failure for failure in fuzzing.failures if failure not in slow] == []
    assert max(tally.longest_seconds for tally in fuzzing.tallies.values()) < 20
    accepted = sum(tally.accepted for tally in fuzzing.tallies.values())
    assert count / 8 < accepted < count / 2
    assert {mutation for _, mutation in fuzzing.tallies} >= set(MUTATIONS)


def test_the_undamaged_checkpoint_is_accepted_and_a_wrong_record_is_not(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    case = (tmp_path / "checkpoint").rename(tmp_path / "case")
    for seed in range(6):
        read_checkpoint(case, tmp_path, Random(seed))
    values = json.loads((case / "manifest.json").read_bytes())
    del values["digest"]
    for name, value in (("tokenizer", ""), ("config", {"model": -1})):
        changed = {**values, "record": {**values["record"], name: value}}
        write_sealed(case / "manifest.json", json.dumps(changed).encode()[:-1] + b",\n")
        with pytest.raises(Exception, match=f"has {name}.* = .*, expected a JSON object"):
            read_checkpoint(case, tmp_path, Random(0))
