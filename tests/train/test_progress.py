"""How far a run is, and its record."""

from __future__ import annotations

import pytest

from megatron.errors import CheckpointError
from megatron.train.progress import Progress


def test_progress_counts_steps_samples_tokens_and_skips() -> None:
    progress = Progress().after(8, 128).after(8, 128, skipped=True)
    assert progress == Progress(step=2, consumed_samples=16, consumed_tokens=256, skipped_steps=1)


def test_progress_survives_json() -> None:
    progress = Progress(3, 24, 384, 1)
    assert Progress.from_json(progress.to_json()) == progress


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"step": None}, "step"),
        ({"consumed_samples": -1}, "consumed_samples"),
        ({"step": True}, "step"),
        ({"epoch": 1}, "epoch"),
    ],
)
def test_progress_refuses_a_damaged_record(change: dict[str, object], name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} missing, unknown or no whole number"):
        Progress.from_json({**Progress().to_json(), **change})


def test_progress_refuses_a_missing_field() -> None:
    with pytest.raises(CheckpointError, match="skipped_steps missing"):
        Progress.from_json({"step": 1, "consumed_samples": 8, "consumed_tokens": 128})
