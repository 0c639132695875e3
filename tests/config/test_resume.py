"""What a resume does with each field that differs from the checkpoint's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.config import Machine, RunConfig, TokenizerFacts, check_resume, resolve
from megatron.config.flags.fields import FROM_CHECKPOINT, MAY_CHANGE, MUST_MATCH, RUN_MUST_MATCH, flags_of, resume_rule
from megatron.config.resume import architecture_differences
from megatron.config.run_config import sections_of
from megatron.config.run_sections import fields_of
from megatron.errors import ConfigError
from tests.config.command_lines import small

SCHEDULE_FREE = "--optimizer schedule-free --lr-decay-style constant"


def run(text: str = "", drop: str = "", vocabulary: int = 1000) -> RunConfig:
    """A resolved small run."""
    facts = TokenizerFacts(vocabulary, vocabulary - 1, "f")
    return resolve(small(text, drop), Machine("cpu", 1, False, True), facts)


def saved(text: str = "", drop: str = "") -> dict[str, Any]:
    """What a checkpoint of that run holds."""
    return json.loads(json.dumps(run(text, drop).to_json()))


def test_an_unchanged_run_resumes_unchanged() -> None:
    assert check_resume(saved(), run()) == run()


@pytest.mark.parametrize(
    ("then", "now", "sentence"),
    [
        ("", "--hidden-size 128", r"--hidden-size is 128, but the checkpoint was saved with 64.*use --hidden-size 64"),
        ("", "--num-layers 5", r"--num-layers is 5, but the checkpoint was saved with 4"),
        (
            "--position-embedding-type rope",
            "--position-embedding-type rope --mtp-num-layers 2 --finetune --load elsewhere",
            r"--mtp-num-layers is 2, but the checkpoint was saved with 0\. They must match: use --mtp-num-layers 0",
        ),
        ("", "--num-attention-heads 2", r"--num-attention-heads is 2, but the checkpoint was saved with 4"),
        ("", "--seq-length 16", r"--seq-length is 16, but .* with 32.*use --finetune"),
        ("--seed 7", "", r"--seed is 1234, but the checkpoint was saved with 7\. They must match: use --seed 7"),
        (
            "",
            "--split 9,1,0",
            r"--split is 9,1,0, but the checkpoint was saved with 969,30,1\. They must match: use --split 969,30,1\.",
        ),
        ("--split 9,1", "--split '8, 1, 1'", r"--split is 8,1,1, but .* use --split 9,1\."),
        ("", "--eod-mask-loss", r"--eod-mask-loss is on, but .* with off.*use --no-eod-mask-loss"),
        ("--eod-mask-loss", "", r"--eod-mask-loss is off, but .* with on.*use --eod-mask-loss"),
        ("", "--no-bias-gelu-fusion", r"--activation-function is gelu, but .* with gelu_tanh"),
        ("--no-bias-gelu-fusion", "", r"--activation-function is gelu_tanh, but .* with gelu\..*use --activation-f"),
        ("", "--optimizer sgd", r"--optimizer is sgd, but .* with adam.*load only its weights, use --no-load-optim"),
        (SCHEDULE_FREE, "--reset-iteration --load x", r"--optimizer is adam, but .* with schedule-free.*--no-load-opt"),
        ("", f"{SCHEDULE_FREE} --reset-iteration --load x", r"--optimizer is schedule-free, but .* with adam.*use --o"),
        (
            SCHEDULE_FREE,
            f"{SCHEDULE_FREE} --adam-beta1 0.8",
            r"--adam-beta1 is 0\.8, but .* with 0\.9.*--no-load-optim",
        ),
    ],
)
def test_fields_that_must_match(then: str, now: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_resume(saved(then), run(now))


@pytest.mark.parametrize(
    ("then", "now", "sentence"),
    [
        ("", "--bidirectional --objective masked", "the checkpoint holds a GPT.* Resume it with pretrain_gpt.py"),
        ("--bidirectional --objective masked", "", "the checkpoint holds an encoder.* Resume it with pretrain_bert"),
    ],
)
def test_another_kind_of_network_is_one_sentence(then: str, now: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as failure:
        check_resume(saved(then), run(now))
    assert len(failure.value.problems) == 1


def test_another_vocabulary_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.vocab_size \(vocabulary size .*\) is 999, but .* with 1000.*--vocab-size"
    ):
        check_resume(saved(), run(vocabulary=999))


def test_all_mismatching_fields_are_reported_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        check_resume(saved(), run("--seed 3 --num-layers 2 --seq-length 8"))
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("text", "notices"),
    [
        ("--train-iters 20", 1),
        ("--lr 1e-4", 1),
        ("--global-batch-size 16", 1),
        ("--bf16", 1),
        ("--bf16 --fp8-format e4m3 --fp8-emulation --fp8-recipe rowwise", 2),
        ("--zero-stage 0 --checkpoint-activations --log-interval 1 --save x --save-interval 2 --num-workers 0", 0),
        ("--data-path elsewhere/corpus_text_document --make-vocab-size-divisible-by 64", 0),
    ],
)
def test_fields_that_may_change(text: str, notices: int) -> None:
    now = run(text)
    going_on = check_resume(saved(), now)
    assert len(going_on.notices) == len(now.notices) + notices
    for section in sections_of(RunConfig):
        assert getattr(going_on, section) == getattr(now, section)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("", "--optimizer sgd --no-load-optim"),
        (SCHEDULE_FREE, "--finetune --load x"),
        (SCHEDULE_FREE, "--reset-iteration --no-load-optim --load x"),
        (SCHEDULE_FREE, f"{SCHEDULE_FREE} --adam-beta1 0.8 --finetune --load x"),
        ("", "--adam-beta1 0.8"),
    ],
)
def test_what_only_the_optimizer_state_depends_on_may_change_without_it(then: str, now: str) -> None:
    assert check_resume(saved(then), run(now)).optim == run(now).optim


@pytest.mark.parametrize(("flags", "is_said"), [("", True), (" --moe-aux-loss-scope global", False)])
def test_another_micro_batch_over_which_experts_are_balanced_is_reported(flags: str, is_said: bool) -> None:
    experts = f"--num-experts 4{flags} --micro-batch-size"
    line = "--micro-batch-size changed from 2 in the checkpoint to 1."
    now = run(f"{experts} 1")
    assert (line in check_resume(saved(f"{experts} 2"), now).notices) is is_said


def test_a_change_of_schedule_is_reported() -> None:
    assert check_resume(saved(), run("--lr 1e-4")).notices == ("--lr changed from 0.001 in the checkpoint to 0.0001.",)


def test_layouts_may_change() -> None:
    now = small("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
    now = resolve(now, Machine("cpu", 4, False, True), TokenizerFacts(1000, 999, "f"))
    assert check_resume(saved(), now).parallel == now.parallel


def test_the_schedule_of_the_checkpoint_on_request() -> None:
    then = saved("--lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 3")
    going_on = check_resume(then, run("--use-checkpoint-lr-scheduler --lr 1"))
    assert (going_on.optim.lr, going_on.optim.lr_decay_style, going_on.optim.lr_warmup_iters) == (3e-4, "cosine", 3)
    assert going_on.provenance["optim.lr"] == "checkpoint"
    assert "--lr 0.0003 is taken from the checkpoint instead of 1.0." in going_on.notices


def test_the_schedule_of_the_checkpoint_keeps_its_length() -> None:
    going_on = check_resume(saved("--lr 3e-4"), run("--use-checkpoint-lr-scheduler --train-iters 50"))
    assert (going_on.optim.lr_decay_iters, going_on.optim.train_iters) == (10, 50)
    text = "--use-checkpoint-lr-scheduler --train-samples 80"
    with pytest.raises(ConfigError, match=r"measured in --train-iters, but this run has --train-samples"):
        check_resume(saved(), run(text, drop="--train-iters"))
    with pytest.raises(ConfigError, match=r"in steps of 8 samples, but --global-batch-size is 16\. Use 8"):
        check_resume(saved(), run("--use-checkpoint-lr-scheduler --global-batch-size 16"))


def test_a_schedule_in_tokens_on_request() -> None:
    drop = "--train-iters"
    then = saved("--train-tokens 2560 --lr-warmup-tokens 512 --min-lr 1e-5", drop)
    longer = run("--use-checkpoint-lr-scheduler --train-tokens 5120", drop)
    going_on = check_resume(then, longer).optim
    assert (going_on.lr_decay_tokens, going_on.lr_warmup_tokens, going_on.train_tokens) == (2560, 512, 5120)
    in_samples = check_resume(then, run("--use-checkpoint-lr-scheduler --train-samples 160", drop)).optim
    assert (in_samples.lr_decay_tokens, in_samples.train_samples) == (2560, 160)
    shortened = saved("--train-tokens 2560 --lr-decay-tokens 1280", drop)
    assert check_resume(shortened, longer).optim.lr_decay_tokens == 1280
    with pytest.raises(ConfigError, match=r"measured in --train-tokens, but this run has --train-iters"):
        check_resume(then, run("--use-checkpoint-lr-scheduler"))


def test_a_run_in_samples_resumes_as_one_in_tokens() -> None:
    now = run("--train-tokens 2560", "--train-iters")
    notices = check_resume(saved("--train-samples 80", "--train-iters"), now).notices
    assert notices == (
        "--train-samples changed from 80 in the checkpoint to None.",
        "--train-tokens changed from None in the checkpoint to 2560.",
    )
    assert check_resume(saved("--train-tokens 2560", "--train-iters"), now) == now


def test_a_split_is_compared_by_its_shares() -> None:
    assert check_resume(saved("--split 969,30,1"), run()).notices == ()
    assert check_resume(saved("--split 9,1"), run("--split 90,10,0")).data.split == "90,10,0"


def test_an_unused_split_is_not_compared() -> None:
    now = run("--train-data-path 1 a 2 b --change-data-blend", drop="--data-path")
    assert check_resume(saved("--split 9,1"), now).data.split == now.data.split


def test_the_index_rule_stays_the_checkpoints() -> None:
    then = saved("--index-epoch-rule nvidia")
    assert check_resume(then, run()).data.index_epoch_rule == "nvidia"
    with pytest.raises(
        ConfigError, match="--index-epoch-rule bigscience contradicts the checkpoint, which was saved with nvidia"
    ):
        check_resume(then, run("--index-epoch-rule bigscience"))


def test_finetuning_keeps_the_network_and_frees_the_rest() -> None:
    now = run("--finetune --load x --seed 5 --seq-length 16 --split 1,0,0 --optimizer sgd --lr 1")
    assert check_resume(saved(), now) == now
    with pytest.raises(ConfigError, match="--num-layers is 2"):
        check_resume(saved(), run("--finetune --load x --num-layers 2"))


def test_a_checkpoint_of_an_older_version_lacks_fields() -> None:
    then = saved()
    del then["kernels"], then["data"]
    now = run("--no-masked-softmax-fusion --seq-length 16")
    assert check_resume(then, now) == now


@pytest.mark.parametrize(
    ("then", "now", "sentence"),
    [
        ("", "--no-bias-gelu-fusion", r"--activation-function is gelu, but .* with gelu_tanh"),
        ("--no-bias-gelu-fusion", "", r"--activation-function is gelu_tanh, but .* with gelu\."),
        ("--no-bias-gelu-fusion --openai-gelu", "--activation-function gelu", "is gelu, but .* with gelu_tanh"),
        ("", "--parallel-residual", r"--parallel-residual is on, but .* with off"),
        ("", "--num-query-groups 2", r"--num-query-groups is 2, but .* with 4"),
        ("", "--layernorm-epsilon 1e-6", r"--layernorm-epsilon is 1e-06, but .* with 1e-05"),
        ("--no-bias-gelu-fusion", "--activation-function gelu", None),
    ],
)
def test_a_checkpoint_without_fields_of_the_architecture_has_their_defaults(
    then: str, now: str, sentence: str | None
) -> None:
    before = saved(then)
    for name in ("activation_function", "parallel_residual", "num_query_groups", "layernorm_epsilon"):
        del before["model"][name]
    if sentence is None:
        assert check_resume(before, run(now)).model == run(now).model
        return
    with pytest.raises(ConfigError, match=sentence):
        check_resume(before, run(now))


def test_the_context_of_rotary_positions_is_the_checkpoints() -> None:
    rope, drop = "--position-embedding-type rope", "--max-position-embeddings"
    assert run(rope, drop).model.max_position_embeddings == 32
    longer = run(f"{rope} --finetune --load x --seq-length 64", drop)
    assert longer.model.max_position_embeddings == 64
    assert check_resume(saved(rope, drop), longer).model.max_position_embeddings == 32
    given = run(f"{rope} --max-position-embeddings 48", drop)
    assert check_resume(saved(rope, drop), given).model.max_position_embeddings == 48
    with pytest.raises(ConfigError, match="--max-position-embeddings is 48, but the checkpoint was saved with 32"):
        check_resume(
            saved(f"{rope} --rope-scaling-type yarn", drop),
            run(f"{rope} --rope-scaling-type yarn --max-position-embeddings 48", drop),
        )


def test_a_field_name_occurs_in_one_section_only() -> None:
    names = [field.name for cls in sections_of(RunConfig).values() for field in fields_of(cls)]
    assert len(names) == len(set(names))


def test_every_field_has_a_rule() -> None:
    rules = {MAY_CHANGE, MUST_MATCH, RUN_MUST_MATCH, FROM_CHECKPOINT}
    for cls in sections_of(RunConfig).values():
        assert {flag.facts.resume for flag in flags_of(cls)} <= rules
        assert {resume_rule(field) for field in fields_of(cls)} <= rules


def test_networks_differ_by_what_a_checkpoint_must_match() -> None:
    assert not list(architecture_differences(saved(), saved("--lr 0.5 --hidden-dropout 0.3 --seed 3")))
    shallow = saved("--num-layers 2", drop="--num-layers")
    assert list(architecture_differences(shallow, saved())) == [("num_layers", 2, 4)]
    rope, drop = "--position-embedding-type rope", "--max-position-embeddings"
    longer = saved(f"{rope} --max-position-embeddings 48", drop)
    assert not list(architecture_differences(saved(rope, drop), longer))
    scaled = f"{rope} --rope-scaling-type yarn"
    longer = saved(f"{scaled} --max-position-embeddings 48", drop)
    assert list(architecture_differences(saved(scaled, drop), longer)) == [("max_position_embeddings", 32, 48)]
