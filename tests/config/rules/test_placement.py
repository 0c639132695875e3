"""Flags that decide memory or results are refused with the nearest legal setting, and harmless values pass."""

from __future__ import annotations

import pytest

from megatron.config import Machine, TokenizerFacts, resolve
from megatron.errors import ConfigError
from tests.config.command_lines import small

EXPERTS = "--num-experts 4 "
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
            NARROW + "--partition-activations",
            "--distribute-saved-activations cannot split --hidden-size 54 over --tensor-model-parallel-size 4",
        ),
        (
            EXPERTS + "--moe-expert-parallel-size 3",
            "--expert-model-parallel-size 3 does not divide --num-experts 4: .* Use one of 1, 2, 4",
        ),
        (EXPERTS + "--expert-model-parallel-size 0", "--expert-model-parallel-size 0 is out of range"),
        (
            EXPERTS + "--expert-tensor-parallel-size 2",
            "--expert-tensor-parallel-size 2 is refused.* Use 1, or --tensor",
        ),
        (
            EXPERTS + "--expert-tensor-parallel-size 1 --tensor-model-parallel-size 2",
            "--expert-tensor-parallel-size 1 with --tensor-model-parallel-size 2 needs --sequence-parallel.* Add it",
        ),
        (
            EXPERTS + "--moe-train-capacity-factor 0",
            "--moe-train-capacity-factor 0.0 is out of range.* Use 1.0 for as many as an even load needs",
        ),
        (EXPERTS + "--moe-expert-capacity-factor -1", "--moe-expert-capacity-factor -1.0 is out.* or drop the flag"),
        (EXPERTS + "--moe-token-drop-policy random", "--moe-token-drop-policy random is unknown. Use one of: probs"),
        (
            "--no-pipeline-parallel --pipeline-model-parallel-size 2",
            "--no-pipeline-parallel contradicts --pipeline-model",
        ),
        (
            EXPERTS + "--enable-expert-tensor-parallelism --expert-tensor-parallel-size 1 --sequence-parallel "
            "--tensor-model-parallel-size 2",
            "--enable-expert-tensor-parallelism contradicts --expert-tensor-parallel-size 1, with which experts are wh",
        ),
        (
            "--num-experts 4 6 --num-layers 4 --expert-model-parallel-size 6",
            "--expert-model-parallel-size 6 comes to 4 ranks, as many as some layer has experts, and 4 does not divide "
            "--num-experts 6: every rank must hold equally many. Use one of 1, 2",
        ),
        ("--use-distributed-optimizer --zero-stage 0", "--use-distributed-optimizer contradicts --zero-stage 0"),
        (
            "--accumulate-allreduce-grads-in-fp32 --fp16 --zero-stage 3",
            "--accumulate-allreduce-grads-in-fp32 is refused with --fp16 and --zero-stage 3",
        ),
        ("--optimizer-cpu-offload", "--optimizer-cpu-offload is refused: .* Use --cpu-optimizer"),
        (
            "--bf16 --fp8-format e4m3 --first-last-layers-bf16 --num-layers-at-end-in-bf16 3",
            "--num-layers-at-start-in-bf16 1 and --num-layers-at-end-in-bf16 3 leave none of --num-layers 4 to --fp8",
        ),
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
        ("", 2, r"does not divide the 2 ranks \(data x context\).*: 2 were started. Use one of 1, 2, or start a .* 4"),
        ("--tensor-model-parallel-size 2", 4, r"does not divide the 2 ranks .* Use one of 1, 2, or start a .* of 8"),
        ("--pipeline-model-parallel-size 3", 9, "does not divide the 3 ranks .* Use 1, or start a multiple of 12"),
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


def test_no_layer_is_on_more_ranks_than_it_has_experts() -> None:
    request = small("--num-experts 4 8 --moe-expert-parallel-size 64 --num-layers 4")
    assert request.parallel.expert_model_parallel_size == 4
    assert "--expert-model-parallel-size 64: some layer has 4 experts" in " ".join(request.notices)
    dense = small("--moe-expert-parallel-size 64")
    assert dense.parallel.expert_model_parallel_size == 1
    assert dense.notices == (
        "--expert-model-parallel-size 64 divides nothing: the network is dense (--num-experts 1).",
    )


def test_an_elastic_run_divides_experts_over_the_ranks_that_are_left() -> None:
    request = small(EXPERTS + "--expert-model-parallel-size 4 --elastic --global-batch-size 24")
    config = resolve(request, Machine("cpu", 6, True, True), TokenizerFacts(600, 599, "none"))
    assert config.parallel.expert_model_parallel_size == 2
