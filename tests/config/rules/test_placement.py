"""Flags that decide memory or results are refused with the nearest legal setting, and harmless values pass."""

from __future__ import annotations

import pytest

from megatron.config import Machine, TokenizerFacts, resolve
from megatron.errors import ConfigError
from tests.config.command_lines import small

EXPERTS = "--num-experts 4 "
CURRICULUM = "--tensor-model-parallel-size 2 --sequence-parallel --curriculum-learning "
DISCRETE = CURRICULUM + "--curriculum-schedule fixed_discrete "
GROWING = CURRICULUM + "--curriculum-min-length 8 --curriculum-steps 10 "
NARROW = "--tensor-model-parallel-size 4 --kv-channels 8 --hidden-size 54 --checkpoint-activations "


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "--checkpoint-activations --checkpoint-num-layers 2",
            "--checkpoint-num-layers 2 is refused.* Use --checkpoint",
        ),
        ("--recompute-granularity full --recompute-num-layers 4", "--checkpoint-num-layers 4 is refused"),
        ("--recompute-granularity full --recompute-method block", "--recompute-method block is refused.* uniform"),
        (
            "--tensor-model-parallel-size 4 --num-attention-heads 4 --sequence-parallel --seq-length 30",
            "--seq-length 30 cannot be split over --tensor-model-parallel-size 4 .* Use --seq-length 32, or drop",
        ),
        (
            DISCRETE + "--curriculum-lengths 7 17 --curriculum-max-steps 3",
            "--curriculum-lengths 7 17 cannot be split .* Use --curriculum-lengths 8 16, or drop",
        ),
        (
            GROWING + "--curriculum-length-step 3",
            "--curriculum-length-step 3 cannot be split over .* Use --curriculum-length-step 4, or drop",
        ),
        (GROWING + "--curriculum-max-length 9", "--curriculum-max-length 9 cannot be split over"),
        (
            NARROW + "--partition-activations",
            "--distribute-saved-activations cannot split --hidden-size 54 over --tensor-model-parallel-size 4",
        ),
        (
            EXPERTS + "--moe-expert-parallel-size 2 --pipeline-model-parallel-size 2",
            "--expert-model-parallel-size 2 cannot be combined with --pipeline-model-parallel-size 2.* Use --pipeline",
        ),
        (EXPERTS + "--expert-tensor-parallel-size 2", "--expert-tensor-parallel-size 2 is refused.* --tensor-model"),
        (
            EXPERTS + "--moe-train-capacity-factor 1.5",
            "--moe-train-capacity-factor 1.5 is refused: no token is dropped",
        ),
        (EXPERTS + "--moe-min-capacity 8", "--moe-min-capacity 8 is refused: no token is dropped"),
        (EXPERTS + "--moe-expert-capacity-factor 1.0", "--moe-expert-capacity-factor 1.0 is refused"),
        (
            "--no-pipeline-parallel --pipeline-model-parallel-size 2",
            "--no-pipeline-parallel contradicts --pipeline-model",
        ),
        ("--use-distributed-optimizer --zero-stage 0", "--use-distributed-optimizer contradicts --zero-stage 0"),
        (
            "--accumulate-allreduce-grads-in-fp32 --fp16 --zero-stage 3",
            "--accumulate-allreduce-grads-in-fp32 is refused with --fp16 and --zero-stage 3",
        ),
        ("--checkpoint-in-cpu", "--checkpoint-in-cpu is refused: what recompute keeps stays on the device"),
    ],
)
def test_what_is_not_done_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        small(text)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    "text",
    [
        "--checkpoint-num-layers 2",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity selective",
        "--sequence-parallel --seq-length 31",  # nothing to split it over
        GROWING,
        NARROW + "--partition-activations --sequence-parallel",
        "--partition-activations --checkpoint-activations",
        "--moe-expert-parallel-size 64 --num-experts 1 --moe-train-capacity-factor 2.0",
        EXPERTS + "--expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --moe-min-capacity 4",
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


@pytest.mark.parametrize(("stage", "ranks", "effective"), [(1, 1, 3), (0, 1, 3), (3, 1, 3), (1, 2, 1), (1, 4, 1)])
def test_experts_are_divided_by_zero_where_tensor_ranks_do_not(stage: int, ranks: int, effective: int) -> None:
    words = f"{EXPERTS}--ep-world-size 2 --zero-stage {stage} --tensor-model-parallel-size {ranks}"
    config = resolve(small(words), Machine("cpu", 4, True, True), TokenizerFacts(600, 599, "none"))
    assert config.parallel.effective_zero_stage == effective
    assert ("experts are divided" in " ".join(config.notices)) is (effective > max(1, stage))


def test_experts_need_as_many_ranks() -> None:
    with pytest.raises(ConfigError, match="--expert-model-parallel-size 64 asks for experts on 4 ranks, and 2 were"):
        resolve(small(EXPERTS + "--moe-expert-parallel-size 64"), Machine("cpu", 2, True, True),
                TokenizerFacts(600, 599, "none"))  # fmt: skip
