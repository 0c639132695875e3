"""Flags that decide memory or results are refused with the nearest legal setting, and harmless values pass."""

from __future__ import annotations

import pytest

from megatron.config import Machine, TokenizerFacts, resolve
from megatron.errors import ConfigError
from tests.config.command_lines import small

EXPERTS = "--num-experts 4 "
NARROW = "--tensor-model-parallel-size 4 --kv-channels 8 --hidden-size 54 --checkpoint-activations "


@pytest.mark.parametrize(
    "text",
    [
        "--checkpoint-num-layers 2",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity selective",
        NARROW + "--partition-activations --sequence-parallel",
        "--partition-activations --checkpoint-activations",
        "--moe-expert-parallel-size 1 --num-experts 1 --moe-train-capacity-factor 2.0",
        EXPERTS + "--expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --moe-min-capacity 4",
        EXPERTS + "--moe-train-capacity-factor 1.5 --moe-min-capacity 8 --moe-token-drop-policy position",
        EXPERTS + "--moe-train-capacity-factor 1.5 --disable-moe-token-dropping",
        "--use-distributed-optimizer --no-pipeline-parallel --accumulate-allreduce-grads-in-fp32 --bf16",
    ],
)
def test_what_changes_nothing_is_accepted(text: str) -> None:
    assert small(text).notices == ()


def test_what_is_kept_for_recomputing_can_be_split() -> None:
    words = "--tensor-model-parallel-size 2 --checkpoint-activations"
    assert not small(words).recompute.distributes_saved
    for flag in ("--partition-activations", "--distribute-checkpointed-activations"):
        assert small(f"{words} {flag}").recompute.distributes_saved
    assert not small("--partition-activations").recompute.distributes_saved


@pytest.mark.parametrize(
    ("words", "ranks", "sentence"),
    [
        (
            "",
            2,
            r"does not divide the 2 ranks \(data x context\).* Use one of 1, 2, or a multiple of 4",
        ),
        ("--tensor-model-parallel-size 2", 4, r"does not divide the 2 ranks .* Use one of 1, 2, or a multiple of 8"),
        ("--pipeline-model-parallel-size 3", 9, "does not divide the 3 ranks .* Use 1, or a multiple of 12"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
            6,
            r"does not divide the 6 ranks \(data x context x tensor 2\) .* Use one of 1, 2, or",
        ),
    ],
)
def test_ranks_that_experts_cannot_be_divided_over(words: str, ranks: int, sentence: str) -> None:
    request = small(f"{EXPERTS} --ep-world-size 4 --global-batch-size 36 --num-layers 3 {words}")
    with pytest.raises(ConfigError, match="--expert-model-parallel-size 4 " + sentence):
        resolve(request, Machine("cpu", ranks, True, True), TokenizerFacts(600, 599, "none"))


def test_an_elastic_run_divides_experts_over_the_ranks_that_are_left() -> None:
    request = small(EXPERTS + "--expert-model-parallel-size 4 --elastic --global-batch-size 24")
    config = resolve(request, Machine("cpu", 6, True, True), TokenizerFacts(600, 599, "none"))
    assert config.parallel.expert_model_parallel_size == 2
