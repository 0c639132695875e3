"""The fields of encoders, and what they need."""

from __future__ import annotations

import pytest

from megatron.errors import ConfigError
from tests.config.command_lines import small

BERT = "--objective masked --bidirectional"


def test_token_types_come_with_the_sentence_order_head() -> None:
    model = small(f"{BERT} --masked-lm-head --sentence-order-head").model
    assert (model.bidirectional, model.masked_lm_head, model.sentence_order_head, model.token_types) == (
        True, True, True, 2,
    )  # fmt: skip
    without = small(f"{BERT} --sentence-order-head --bert-no-binary-head").model
    assert (without.sentence_order_head, without.token_types) == (False, 0)
    assert small(f"{BERT} --num-token-types 1").model.token_types == 1
    assert small().model.token_types == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-token-types 2", "--num-token-types 2: only encoders have this. Add --bidirectional"),
        ("--masked-lm-head", "--masked-lm-head: only encoders have this"),
        ("--sentence-order-head", "--sentence-order-head: only encoders have this"),
        ("--objective masked", "--objective masked needs --bidirectional"),
        (
            "--bidirectional",
            "--bidirectional cannot be combined with --objective causal: a token would see",
        ),
        (f"{BERT} --norm-placement post --parallel-residual", "cannot be combined with --norm-placement post,"),
    ],
)
def test_parts_of_an_encoder_need_each_other(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(words)
