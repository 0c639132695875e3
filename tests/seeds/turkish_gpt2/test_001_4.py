"""Scenario 001.4: eight layouts of the same run train alike, and layouts that DeepSpeed cannot run are refused."""

from __future__ import annotations

import pytest

from megatron.config import parse
from megatron.errors import ConfigError
from tests.seeds.turkish_gpt2.layout_runs import LAYOUTS, STEPS, LayoutRuns

pytestmark = [pytest.mark.xdist_group("layouts"), pytest.mark.slow]


def test_001_4_eight_layouts_train_alike(layout_runs: LayoutRuns) -> None:
    alone = layout_runs.trained[1, 1, 1]
    assert len(LAYOUTS) == 8 and sorted(alone) == list(range(1, STEPS + 1))
    assert alone[STEPS]["lm_loss"] < alone[1]["lm_loss"] - 0.2, "the run must learn something"
    for layout, steps in layout_runs.trained.items():
        assert sorted(steps) == sorted(alone), layout
        for step, record in steps.items():
            for name in ("lm_loss", "gradient_norm"):
                assert record[name] == pytest.approx(alone[step][name], abs=1e-4), f"{layout}, step {step}: {name}"


def test_the_stage_that_splits_weights_is_refused_with_a_pipeline() -> None:
    flags = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32"]
    flags += ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", "--data-path", "x", "--vocab-file", "x"]
    flags += ["--max-position-embeddings", "32", "--merge-file", "x", "--pipeline-model-parallel-size", "2"]
    with pytest.raises(ConfigError, match="--zero-stage 3") as refused:
        parse([*flags, "--zero-stage", "3"])
    (problem,) = refused.value.problems
    assert (
        "\n" not in problem
        and "Use --zero-stage 0, 1 or 2, or" in problem
        and "--pipeline-model-parallel-size 1" in problem
    )
    for legal in (["--zero-stage", "2"], ["--zero-stage", "3", "--pipeline-model-parallel-size", "1"]):
        parse([*flags, *legal])
