"""The fields of encoders, and what they need."""

from __future__ import annotations

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
