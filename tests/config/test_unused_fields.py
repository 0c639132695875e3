"""Fields of the architecture that have no effect: they are announced, and do not stand in the way of a resume."""

from __future__ import annotations

import dataclasses
import re

import pytest

from megatron.config import Machine, TokenizerFacts, check_resume, resolve
from megatron.config.run_config import RunConfig
from megatron.config.sections.model import unused_fields
from megatron.errors import ConfigError
from tests.config.command_lines import small


def resolved(text: str) -> RunConfig:
    return resolve(small(text), Machine("cpu", 1, False, True), TokenizerFacts(1000, 999, "f"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--rotary-base 5e5", "--rotary-base 500000.0 has no effect without RoPE"),
        ("--position-embedding-type alibi --rotary-percent 0.5", "--rotary-percent 0.5 has no effect without RoPE"),
        (
            "--position-embedding-type rope --rope-beta-fast 4",
            "--rope-beta-fast 4.0 .* without --rope-scaling-type yarn",
        ),
        ("--position-embedding-type rope --rotary-base-windowed 9", "--rotary-base-windowed 9.0 .* --attention-window"),
        ("--qk-layernorm-scope all", "--qk-layernorm-scope all has no effect without --qk-layernorm"),
        ("--moe-router-topk 3", "--moe-router-topk 3 has no effect without --num-experts"),
        (
            "--num-experts 4 --moe-router-score-function sigmoid --moe-router-pre-softmax",
            "--moe-router-pre-softmax has no effect without --moe-router-score-function softmax",
        ),
        (
            "--num-experts 4 --moe-router-topk 1 --moe-router-score-function sigmoid --moe-router-keep-scores",
            "--moe-router-keep-scores has no effect without --moe-router-topk above 1",
        ),
        (
            "--multi-latent-attention --position-embedding-type rope --kv-channels 7",
            "--kv-channels 7 .* with --multi-l",
        ),
        ("--openai-gelu --swiglu", "--openai-gelu has no effect without --activation-function gelu"),
    ],
)
def test_a_field_without_effect_is_announced_and_does_not_hinder_a_resume(text: str, sentence: str) -> None:
    config = resolved(text)
    assert any(re.search(sentence, notice) for notice in config.notices), config.notices
    kept = {"--position-embedding-type", "rope", "alibi", "--swiglu", "--multi-latent-attention"}
    plain = resolved(" ".join(word for word in text.split() if word in kept) or text.rpartition("--")[0])
    check_resume(config.to_json(), plain)
    check_resume(plain.to_json(), config)


def test_a_field_with_effect_is_not_unused() -> None:
    config = resolved("--position-embedding-type rope --rope-scaling-type llama3 --num-experts 4 --qk-layernorm")
    unused = unused_fields(config.model)
    assert not unused.keys() & {"rotary_base", "rope_low_freq_factor", "moe_router_topk", "qk_layernorm_scope"}
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, rotary_base=9.0))
    with pytest.raises(ConfigError, match="--rotary-base is 9.0, but the checkpoint was saved with 10000.0"):
        check_resume(config.to_json(), other)
