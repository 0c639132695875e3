"""`pretrain_gpt.py --finetune --load ...` begins at iteration 0 and resumes by the same command."""

from __future__ import annotations

import pytest

from megatron.errors import ExitCode
from megatron.observe.metrics_file import read_steps
from tests.seeds.conftest import FineTuning

pytestmark = pytest.mark.xdist_group("fine-tuning scenarios")  # one worker, so that the network is trained once


def test_001_7_an_interrupted_fine_tuning_continues_by_the_same_command(fine_tuning: FineTuning) -> None:
    (first, _), (second, _) = fine_tuning.outcomes
    assert (first, second) == (ExitCode.DONE, ExitCode.DONE)
    steps = read_steps(fine_tuning.run)
    assert sorted(steps) == list(range(1, 121)), "40 passes over 24 examples in batches of 8"
    assert steps[1]["consumed_samples"] == 8, "the base's samples are not counted"
    assert steps[41]["consumed_samples"] == 41 * 8, "the second start begins where the first one ended"


def test_the_loss_falls(fine_tuning: FineTuning) -> None:
    steps = read_steps(fine_tuning.run)
    assert steps[1]["lm_loss"] > 4 and steps[120]["lm_loss"] < 0.2
