"""When a run that keeps failing does not start again: scripted histories."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from megatron.config.sections.safety import SafetyRequest
from megatron.train.restarts.history import Attempt
from megatron.train.restarts.restart_policy import decide, settings_digest


def end(step: int | None, resumed: int = 4, code: int | None = 77, **changes: object) -> Attempt:
    """A start that came as far as training and ended at a step."""
    found = Attempt("key", resumed, "s", (), "2026-01-01T00:00:00Z", True, step, code, "loss nan")
    changes = {"blames_step": code == 77, **changes}
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


KILLED = end(7, code=None)
ASKED = end(5, code=75, was_requested=True)
STARTING = end(None, code=None)
PASSED = {"batch_skips": (7,)}

# name: history, step of the checkpoint to start from, flags; whether the start is refused, or what it skips.
SCENARIOS: dict[str, tuple[Sequence[Attempt], int, dict[str, object], bool | tuple[int, ...]]] = {
    "a first start": ((), 0, {}, False),
    "three failures": ([end(7)] * 3, 4, {}, True),
    "failures of any kind": ([end(7), KILLED, end(7, code=1)], 4, {}, True),
    "before the first checkpoint": ([end(3, 0)] * 3, 0, {}, True),
    "other steps": ([end(7), end(8), end(7)], 4, {}, False),
    "the first one saved": ([end(7, 2), end(7), end(7)], 4, {}, True),
    "the second one saved": ([end(7, 2), end(7, 2), end(7)], 4, {}, False),
    "kills during start-up": ([STARTING] * 9, 4, {}, False),
    "start-ups between failures": ([end(7), STARTING, end(7), STARTING, end(7), STARTING], 4, {}, True),
    "signals": ([ASKED] * 9, 4, {}, False),
    "signals between failures": ([end(7), ASKED, end(7), ASKED, end(7)], 4, {}, True),
    "an end at an unknown step": ([end(7), end(None), end(7), end(7)], 4, {}, True),
    "other settings now": ([end(7, settings="other")] * 3, 4, {}, False),
    "no limit": ([end(7)] * 99, 4, {"max_failed_starts": 0}, False),
    "a limit of one": ([end(7)], 4, {"max_failed_starts": 1}, True),
    "NaN is skipped": ([end(7)] * 3, 4, {"resume_skip_poisoned": True}, (7,)),
    "not yet": ([end(7)] * 2, 4, {"resume_skip_poisoned": True}, ()),
    "a kill is not": ([end(7), end(7), KILLED], 4, {"resume_skip_poisoned": True}, True),
    "replicas that differ are not": ([end(7, blames_step=False)] * 3, 4, {"resume_skip_poisoned": True}, True),
    "skipped ranges stay skipped": ([*[end(7)] * 3, end(9, **PASSED)], 4, {}, (7,)),
    "failing behind it as often": ([*[end(7)] * 3, *[end(7, **PASSED)] * 3], 4, {}, True),
    "one more batch": ([end(7, **PASSED)] * 3, 4, {"resume_skip_poisoned": True}, (7, 7)),
    "bad weights": ([end(7, batch_skips=(7, 7, 7))] * 3, 4, {"resume_skip_poisoned": True}, True),
    "another batch": ([end(9, 8, **PASSED)] * 3, 8, {"resume_skip_poisoned": True}, (7, 9)),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_who_may_start(name: str) -> None:
    attempts, resumed, flags, expected = SCENARIOS[name]
    refusal, passes = decide(attempts, resumed, "s", SafetyRequest(**flags))  # type: ignore[arg-type]
    assert (refusal is not None) == (expected is True)
    if expected is not True:
        assert passes == (expected or ())


def test_no_loop_is_endless() -> None:
    """A run that fails the same way whenever it may start is refused in the end, with the flag for NaN, too."""
    for flags, most in (({}, 3), ({"resume_skip_poisoned": True}, 3 * 4)):
        attempts: list[Attempt] = []
        while (decided := decide(attempts, 4, "s", SafetyRequest(**flags)))[0] is None:
            attempts.append(end(7, batch_skips=decided[1]))
            assert len(attempts) <= most
        assert len(attempts) == most


def test_a_refusal_shows_the_history_and_the_ways_out() -> None:
    text = decide([end(7), end(7), end(7)], 4, "s", SafetyRequest())[0] or ""
    assert "ended 3 times in a row at iteration 7 without saving a checkpoint newer than iteration 4" in text
    assert text.count("  2026-01-01T00:00:00Z: from iteration 4, ended at iteration 7, exit code 77: loss nan\n") == 3
    for way in (
        "--resume-skip-poisoned skips the batch of iteration 7,",
        "--ckpt-step",
        "--skip-train-iteration-range 7-7",
        "--max-failed-starts 0",
    ):
        assert f"\n  {way}" in text
    again = decide([end(7, **PASSED)] * 3, 4, "s", SafetyRequest())[0] or ""
    assert "--resume-skip-poisoned skips one more batch of iteration 7, in addition to 1" in again
    killed = decide([KILLED] * 3, 4, "s", SafetyRequest())[0] or ""
    assert "--resume-skip-poisoned" not in killed and "killed without a message" in killed
    once = decide([end(7)] * 20, 4, "s", SafetyRequest(max_failed_starts=1))[0] or ""
    assert "20 times in a row" in once and once.count("loss nan") == 10


def test_settings_are_distinguished_by_what_a_step_depends_on() -> None:
    config: dict[str, dict[str, object]] = {
        "optim": {"lr": 1.0},
        "safety": {"skip_train_iteration_range": [], "log_interval": 1},
        "parallel": {"tensor_model_parallel_size": 2, "world_size": 4},
    }
    digest = settings_digest(config)
    assert settings_digest({**config, "safety": {**config["safety"], "log_interval": 2}}) == digest
    assert settings_digest({**config, "parallel": {**config["parallel"], "world_size": 8}}) == digest
    assert settings_digest({**config, "optim": {"lr": 0.5}}) != digest
    assert settings_digest({**config, "safety": {"skip_train_iteration_range": ["7-7"]}}) != digest
