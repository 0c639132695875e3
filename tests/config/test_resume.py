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


def run(text: str = "", drop: str = "", vocabulary: int = 1000) -> RunConfig:
    """A resolved small run."""
    facts = TokenizerFacts(vocabulary, vocabulary - 1, "f")
    return resolve(small(text, drop), Machine("cpu", 1, False, True), facts)


def saved(text: str = "", drop: str = "") -> dict[str, Any]:
    """What a checkpoint of that run holds."""
    return json.loads(json.dumps(run(text, drop).to_json()))


def test_an_unchanged_run_resumes_unchanged() -> None:
    assert check_resume(saved(), run()) == run()


def test_layouts_may_change() -> None:
    now = small("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
    now = resolve(now, Machine("cpu", 4, False, True), TokenizerFacts(1000, 999, "f"))
    assert check_resume(saved(), now).parallel == now.parallel


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
