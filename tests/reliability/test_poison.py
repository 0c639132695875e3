"""Values that are damaged on one rank in the middle of a run: no checkpoint holds them, and all ranks agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns.damage.poison import Poison, run_poisoned
from megatron.errors import ExitCode
from tests.helpers.campaign_cases import mark_campaign
from tests.helpers.tiny_run import TinyCorpus, write_tiny_corpus

NORM = "decoder.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


FLIPS = {
    "tp2-zero0 weight": ("tp2-zero0", "weight", []),
    "tp2-zero1-bf16 master": ("tp2-zero1-bf16", "master", []),
    "dp2-zero0 weight, at an interval": ("dp2-zero0", "weight", ["--check-replicas-interval", "3"]),
}


@pytest.mark.full
@pytest.mark.parametrize("name", mark_campaign(FLIPS, ["tp2-zero1-bf16 master", "dp2-zero0 weight, at an interval"]))
def test_a_flipped_bit_in_a_copy_ends_the_run_with_the_last_checkpoint_intact(
    name: str, corpus: TinyCorpus, tmp_path: Path
) -> None:
    layout, kind, more = FLIPS[name]
    ending = run_poisoned(corpus, tmp_path, layout, Poison(1, 3, kind, "flip", NORM, 0.5, 20), more)
    at = 3 if more else 4
    assert ending.codes == [ExitCode.NUMERICS] * 2
    assert f"iteration {at}: copies of the same values differ between ranks. {NORM} (" in ending.text
    assert "rank 1 holds" in ending.text and " elements differ between rank 0 and rank 1, the first at " in ending.text
    assert ending.checkpoints == {2: 0}


@pytest.mark.full
def test_without_the_check_the_copies_drift_apart_unnoticed(corpus: TinyCorpus, tmp_path: Path) -> None:
    """So it is the check that finds them."""
    poison = Poison(1, 3, "weight", "flip", NORM, 0.5, 20)
    ending = run_poisoned(corpus, tmp_path, "tp2-zero0", poison, ["--check-replicas-interval", "0"])
    assert (ending.outcome, set(ending.checkpoints)) == ("trained on", {2, 4, 6, 8})


def test_a_bad_batch_is_passed_over_and_counted(corpus: TinyCorpus, tmp_path: Path) -> None:
    """The step at which a save was due is bad, so the next one is saved."""
    poison = Poison(0, 4, "gradient", "nan", "decoder.layers.0.mlp.linear_fc1.weight")
    ending = run_poisoned(corpus, tmp_path, "dp2-zero1", poison, ["--max-bad-steps", "1"])
    assert (ending.codes, ending.bad_steps, set(ending.checkpoints)) == ([0, 0], 1, {2, 5, 6, 8})
    ended = run_poisoned(corpus, tmp_path / "none", "dp2-zero1", poison, ["--max-bad-steps", "0"])
    assert (ended.codes, set(ended.checkpoints)) == ([ExitCode.NUMERICS] * 2, {2})
    assert "iteration 4: loss " in ended.text and "(samples 24 to 31); this exceeds --max-bad-steps 0" in ended.text
