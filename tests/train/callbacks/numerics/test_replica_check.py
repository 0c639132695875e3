"""When copies are compared, and what a run says about those that differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpoint.record import Progress
from megatron.config.sections.safety import SafetyConfig
from megatron.errors import NumericsError
from megatron.train.callbacks import numerics
from megatron.train.callbacks.numerics import ReplicaCheck, check_replicas

STEP: Any = None


def run_at(step: int) -> Any:
    """As much of a run as the check looks at."""
    return SimpleNamespace(
        engine="engine", progress=Progress(step), is_due=lambda interval: bool(interval) and step % interval == 0
    )


def callback_of(interval: int | None) -> Any:
    safety = SafetyConfig(check_replicas_interval=interval)
    setup: Any = SimpleNamespace(config=SimpleNamespace(safety=safety))
    return ReplicaCheck.of(setup)


def test_copies_that_differ_end_the_run_with_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    differences: list[str] = []
    monkeypatch.setattr(numerics, "find_differences", lambda engine: differences)
    check_replicas(run_at(7))
    differences += [f"tensor {number}" for number in range(7)]
    sentence = (
        r"^iteration 7: copies of the same values differ between ranks\. tensor 0; tensor 1; tensor 2; tensor 3; "
        r"tensor 4; and 2 more\. Nothing was saved; earlier checkpoints are intact: .* --check-replicas-interval 0"
    )
    with pytest.raises(NumericsError, match=sentence) as caught:
        check_replicas(run_at(7))
    assert caught.value.step is None  # no batch is to blame


@pytest.mark.parametrize(("interval", "is_checked"), [(None, True), (0, False), (5, True), (7, False)])
def test_copies_are_checked_before_a_save(
    monkeypatch: pytest.MonkeyPatch, interval: int | None, is_checked: bool
) -> None:
    """Unless that is turned off, or they were checked at the end of this step."""
    checked: list[str] = []
    monkeypatch.setattr(numerics, "find_differences", lambda engine: checked.append(engine) or [])
    callback = callback_of(interval)
    if callback is not None:
        callback.before_save(run_at(7))
    assert checked == (["engine"] if is_checked else [])


def test_copies_are_compared_at_their_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    monkeypatch.setattr(numerics, "check_replicas", lambda run: compared.append(run.progress.step))
    callback = callback_of(2)
    for step in range(1, 6):
        callback.after_step(run_at(step), STEP)
    assert compared == [2, 4]
