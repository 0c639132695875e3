"""Scenario 004.4: metrics always go to a JSONL file and to TensorBoard, and to Weights & Biases only if asked."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.observe.metrics_file import read_steps
from tests.helpers.projects.jax_lm_page import PageRun

pytestmark = pytest.mark.xdist_group("jax-lm-training")  # one worker, so that the page is executed once


def test_004_4_metrics(jax_lm: PageRun) -> None:
    folder = jax_lm.folder
    steps = read_steps(folder / "artifacts" / "run")
    events = EventAccumulator(str(folder / "artifacts" / "tensorboard")).Reload()
    shown = {event.step: event.value for event in events.Scalars("lm-loss-training/lm loss")}
    assert shown == pytest.approx({step: record["lm_loss"] for step, record in steps.items()}, rel=1e-6)
    offline = list(folder.glob(".wandb/wandb/offline-run-*/run-*.wandb"))
    assert len(offline) == 1, "only the third run asked for Weights & Biases"
    assert not list(folder.glob("wandb")) and not list((folder / "artifacts").rglob("*.wandb"))
    assert b"lm-loss-validation/valid" in offline[0].read_bytes()
