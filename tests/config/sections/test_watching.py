"""Which steps a profile has, in the spellings of Megatron-LM and Megatron-DeepSpeed."""

from __future__ import annotations

import pytest

from megatron.config.sections.reporting import WatchingConfig
from megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, (11, 12)),
        ({"profile_step_start": 4}, (5, 6)),
        ({"profile_step_start": 4, "profile_step_end": 6}, (5, 6)),
        ({"profile_step_end": 2}, (1, 2)),
        ({"profile_step_end": 1}, (1, 1)),
        ({"profile_steps": "2,3"}, (3, 3)),
        ({"profile_steps": "0, 4"}, (1, 4)),
    ],
)
def test_the_steps_of_a_profile(given: dict[str, str | int], steps: tuple[int, int]) -> None:
    assert WatchingConfig(profile=(), **given).profiled_steps == steps
    assert WatchingConfig(**given).profiled_steps is None


def test_how_much_a_profile_has() -> None:
    assert WatchingConfig(profile=("pt-full",)).profile_is_full
    assert not WatchingConfig(profile=("pt",)).profile_is_full
    assert not WatchingConfig(profile=()).profile_is_full


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"profile": ("pt", "pt-full")}, r"--profile pt pt-full names 2 kinds\. Name one"),
        ({"profile": ("nsys",)}, r"--profile nsys is unknown\. Use one of: pt, pt-full"),
        ({"profile_steps": "2-3"}, r"--profile-steps 2-3 is invalid"),
        (
            {"profile_steps": "2,3", "profile_step_end": 3},
            r"--profile-steps 2,3 cannot be combined with --profile-step-start .* Drop one",
        ),
        (
            {"profile": (), "profile_step_start": 5, "profile_step_end": 5},
            r"--profile-step-end 5 is not after --profile-step-start 5, .* Use --profile-step-end 6",
        ),
        ({"peak_tflops": 0.0}, r"--peak-tflops 0.0 is out of range"),
    ],
)
def test_what_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        WatchingConfig(**given)  # type: ignore[arg-type]
