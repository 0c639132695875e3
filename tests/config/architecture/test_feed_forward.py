"""Flags of routing that contradict each other are refused with the nearest legal value; published flags mean fields."""

from __future__ import annotations

from megatron.config.rules.experts import balancing_notices
from megatron.config.run_sections import DEFAULT
from tests.config.command_lines import small

EXPERTS = "--num-experts 8 --moe-router-topk 4 "


def test_a_default_that_ties_gradients_to_the_micro_batch_is_said() -> None:
    def said(flags: str) -> list[str]:
        request = small(flags)
        is_by_choice = request.provenance["model.moe_aux_loss_scope"] != DEFAULT
        return [*balancing_notices(request.model, is_by_choice=is_by_choice)]

    assert said(EXPERTS) == [
        "The load-balancing loss is computed per micro-batch, as in Megatron-LM, so gradients depend on "
        "--micro-batch-size. With --moe-aux-loss-scope global they do not."
    ]
    for told in ("--moe-router-load-balancing-type aux_loss", "--moe-aux-loss-scope sample", "--moe-aux-loss-coeff 0"):
        assert said(f"{EXPERTS} {told}") == []
