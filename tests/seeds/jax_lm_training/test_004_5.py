"""Scenario 004.5: one command trains the same network in PyTorch and in JAX, and prints the figures of both."""

from __future__ import annotations

import json

import pytest

from tests.helpers.projects.jax_lm_page import PageRun

pytestmark = pytest.mark.xdist_group("jax-lm-training")  # one worker, so that the page is executed once


def test_004_5_torch_compared_with_jax(jax_lm: PageRun) -> None:
    records = [json.loads(line) for line in jax_lm.out.splitlines() if line.startswith('{"benchmark"')]
    figures = {record["figure"]: record["value"] for record in records}
    assert all(record["steps"] == 6 and record["model"] == "tiny" for record in records)
    for side in ("ours", "jax"):
        assert figures[f"{side}_tokens_per_second"] > 0 and figures[f"{side}_step"] > 0
    assert figures["ours_final_loss"] == pytest.approx(figures["jax_final_loss"], abs=2e-4)
    assert figures["largest_difference_of_losses"] < 100  # 1e-6 nats
    assert figures["ours_final_loss"] < 6.24, "nothing was learnt: the loss is that of equal probabilities, ln 512"
