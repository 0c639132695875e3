"""The flags of a curriculum: what they need of each other, and what does not go with them."""

from __future__ import annotations

import pytest

from megatron.errors import ConfigError
from tests.config.command_lines import small

GROWING = "--curriculum-learning --curriculum-min-length 8 --curriculum-steps 4"


def test_a_curriculum_by_flags() -> None:
    optim = small(GROWING + " --curriculum-schedule fixed_root").optim
    assert (optim.curriculum_learning, optim.curriculum_min_length, optim.curriculum_max_length) == (True, 8, None)
    assert (optim.curriculum_steps, optim.curriculum_length_step, optim.curriculum_root_degree) == (4, 8, 2.0)
    parts = "--curriculum-schedule fixed_discrete --curriculum-lengths 8 16 32 --curriculum-max-steps 3 6"
    assert small(f"--curriculum-learning {parts}").optim.curriculum_max_steps == (3, 6)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--curriculum-steps 4", "--curriculum-steps 4 has no effect without --curriculum-learning. Add it, or drop"),
        ("--curriculum-lengths 8 16", "--curriculum-lengths 8 16 has no effect without --curriculum-learning"),
        ("--curriculum-learning --curriculum-steps 4", "--curriculum-min-length is required by --curriculum-schedule"),
        ("--curriculum-learning --curriculum-min-length 8", "--curriculum-steps is required by --curriculum-schedule"),
        (
            GROWING + " --curriculum-length-step 16",
            "--curriculum-min-length 8 is less than --curriculum-length-step 16, .* Use at least 16, or smaller steps",
        ),
        (
            GROWING.replace(" 8 ", " 24 ") + " --curriculum-max-length 16",
            "--curriculum-min-length 24 is more than --curriculum-max-length 16.*swap them",
        ),
        (
            "--curriculum-learning --curriculum-schedule fixed_discrete --curriculum-lengths 8 16",
            "has 2 --curriculum-lengths and 0 --curriculum-max-steps. Every length but the last needs the step",
        ),
        (
            "--curriculum-learning --curriculum-schedule fixed_discrete --curriculum-lengths 16 8 "
            "--curriculum-max-steps 3",
            "--curriculum-lengths 16 8 must be in ascending order",
        ),
        (GROWING + " --curriculum-max-length 64", "--curriculum-max-length 64 is more than --seq-length 32, a whole"),
        (GROWING + " --curriculum-root-degree 0.5", "--curriculum-root-degree 0.5 is out of range"),
        (
            GROWING + " --objective masked --bidirectional",
            "--curriculum-learning does not go with --objective masked",
        ),
    ],
)
def test_what_does_not_fit_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        small(text)


def test_epochs_count_whole_samples() -> None:
    with pytest.raises(ConfigError, match="--epochs 2 does not go with --curriculum-learning.*Give --train-iters"):
        small(f"{GROWING} --epochs 2", drop="--train-iters")
