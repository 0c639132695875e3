"""A rank that hangs, fails or dies ends the run, and one message names it; more cases are drawn by `hangs.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.samples import sampled
from tests.helpers.tiny_run import TinyCorpus, write_tiny_corpus
from tests.reliability.kills.hangs import Fault, run_case

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


FAULTS = [
    Fault("dp2", "stop", 0, "save"),
    Fault("dp2", "stop", 1, "join"),
    Fault("dp2", "stop", 0, "join"),
    Fault("dp2", "stop", 1, "load"),
    Fault("dp2", "stop", 0, "index"),
    Fault("cp2", "stop", 1, "forward"),
    Fault("tp2pp2", "stop", 3, "backward"),
    Fault("tp2pp2", "spin", 2, "p2p"),
    Fault("tp2", "kill", 0, "init"),
    Fault("tp2pp2", "exit", 0, "forward"),
    Fault("pp2", "error", 1, "data"),
    Fault("dp2", "bug", 0, "evaluation"),
    Fault("tp2", "stop", 1, "forward"),
    Fault("tp2", "hold", 0, "step"),
    Fault("dp2", "sleep", 1, "loader"),
    Fault("dp2", "stop", 1, "evaluation"),
]


@pytest.mark.parametrize(
    "fault", sampled(FAULTS, FAULTS[:12]), ids=lambda fault: f"{fault.layout}-{fault.kind}-{fault.phase}"
)
def test_all_ranks_end_and_the_right_one_is_named(corpus: TinyCorpus, tmp_path: Path, fault: Fault) -> None:
    outcome = run_case(corpus, tmp_path / "case", fault)
    assert not outcome.problem
    assert outcome.is_named
