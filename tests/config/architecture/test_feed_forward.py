"""Flags of routing that contradict each other are refused with the nearest legal value; published flags mean fields."""

from __future__ import annotations

import pytest

from megatron.config.rules.experts import balancing_notices
from megatron.config.run_sections import DEFAULT
from tests.config.command_lines import small

EXPERTS = "--num-experts 8 --moe-router-topk 4 "


def test_a_bias_takes_the_place_of_the_loss_unless_a_coefficient_is_given() -> None:
    assert small(EXPERTS).model.moe_aux_loss_coeff == 0.01
    bias = EXPERTS + "--moe-router-enable-expert-bias "
    assert small(bias).model.moe_aux_loss_coeff == 0.0
    assert small(bias + "--moe-aux-loss-coeff 0.0001").model.moe_aux_loss_coeff == 0.0001


@pytest.mark.parametrize(
    "value, scope", [("aux_loss", "micro_batch"), ("seq_aux_loss", "sample"), ("global_aux_loss", "global")]
)
def test_balancing_by_the_names_of_megatron(value: str, scope: str) -> None:
    model = small(EXPERTS + f"--moe-router-load-balancing-type {value}").model
    assert model.moe_aux_loss_scope == scope and model.moe_aux_loss_coeff == 0.01
    assert small(EXPERTS + "--moe-router-load-balancing-type none").model.moe_aux_loss_coeff == 0.0


def test_flags_that_change_nothing_are_named() -> None:
    assert "--moe-router-enable-expert-bias" in small(EXPERTS + "--moe-router-bias-update-rate 0.1").notices[0]
    assert "--moe-expert-capacity-factor" in small(EXPERTS + "--moe-token-drop-policy position").notices[0]


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
