"""Fields of the architecture that have no effect: they are announced, and do not stand in the way of a resume."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config import Machine, TokenizerFacts, check_resume, resolve
from megatron.config.run_config import RunConfig
from megatron.config.sections.model import unused_fields
from megatron.errors import ConfigError
from tests.config.command_lines import small


def resolved(text: str) -> RunConfig:
    return resolve(small(text), Machine("cpu", 1, False, True), TokenizerFacts(1000, 999, "f"))


@pytest.mark.parametrize(
    ("plain", "idle"),
    [
        ("", "--rotary-base 5e5"),
        ("--position-embedding-type alibi", "--rotary-percent 0.5"),
        ("--position-embedding-type rope", "--rope-beta-fast 4 --rotary-base-windowed 9"),
        ("", "--qk-layernorm-scope all --moe-router-topk 3"),
        ("--num-experts 4 --moe-router-score-function sigmoid", "--moe-router-pre-softmax"),
        ("--multi-latent-attention --position-embedding-type rope", "--kv-channels 7"),
        ("--swiglu", "--openai-gelu"),
    ],
)
def test_a_field_without_effect_does_not_hinder_a_resume(plain: str, idle: str) -> None:
    one, other = resolved(plain), resolved(f"{plain} {idle}")
    assert sum("has no effect" in notice for notice in other.notices) == idle.count("--")
    check_resume(one.to_json(), other)
    check_resume(other.to_json(), one)


def test_a_field_with_effect_is_not_unused() -> None:
    config = resolved("--position-embedding-type rope --rope-scaling-type llama3 --num-experts 4 --qk-layernorm")
    unused = unused_fields(config.model)
    assert not unused.keys() & {"rotary_base", "rope_low_freq_factor", "moe_router_topk", "qk_layernorm_scope"}
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, rotary_base=9.0))
    with pytest.raises(ConfigError, match="--rotary-base is 9.0, but the checkpoint was saved with 10000.0"):
        check_resume(config.to_json(), other)
