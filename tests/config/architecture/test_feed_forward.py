"""Flags of routing that contradict each other are refused with the nearest legal value; published flags mean fields."""

from __future__ import annotations

import pytest

from megatron.config.expert_rules import balancing_notices
from megatron.config.run_config import DEFAULT
from megatron.errors import ConfigError
from tests.config.command_lines import small

EXPERTS = "--num-experts 8 --moe-router-topk 4 "


@pytest.mark.parametrize(
    "text, sentence",
    [
        (
            "--moe-layer-pattern 0 0 0 0 0 0 0 0 0 1",
            "--num-experts 8 with --moe-layer-pattern 0 .* gives none of the . layers experts. Use a pattern with a 1",
        ),
        ("--moe-router-num-groups 4", "--moe-router-num-groups 4 needs --moe-router-group-topk. Give both"),
        ("--moe-router-group-topk 2", "--moe-router-group-topk 2 needs --moe-router-num-groups"),
        (
            "--moe-router-num-groups 3 --moe-router-group-topk 2",
            "--num-experts 8 cannot be divided into --moe-router-num-groups 3 .*Use --moe-router-num-groups 2",
        ),
        (
            "--moe-router-num-groups 4 --moe-router-group-topk 1",
            "--moe-router-group-topk 1 does not go with --moe-router-topk 4 .* lie in 2 to 4 groups. "
            "Use --moe-router-group-topk 2",
        ),
        (
            "--moe-router-num-groups 2 --moe-router-group-topk 3",
            "--moe-router-group-topk 3 does not .* Use --moe-router-group-topk 2",
        ),
        (
            "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-group-scored-experts 3",
            "--moe-router-group-scored-experts 3 is more than the 2 experts of a group .* Use at most 2",
        ),
        ("--moe-router-num-groups 0 --moe-router-group-topk 1", "--moe-router-num-groups 0 is out of range"),
        ("--moe-router-bias-update-rate -0.1", "--moe-router-bias-update-rate -0.1 is out of range"),
        ("--moe-aux-loss-scope batch", "--moe-aux-loss-scope batch is unknown. Use one of: micro_batch, sample, glo"),
        ("--moe-router-load-balancing-type sinkhorn", "sinkhorn is refused: it chooses experts for a whole micro-b"),
        ("--moe-router-load-balancing-type lucky", "lucky is unknown. Use one of: aux_loss, seq_aux_loss, global"),
    ],
)
def test_what_cannot_be_routed_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        small(EXPERTS + text)
    assert len(caught.value.problems) == 1


def test_groups_divide_the_experts_of_every_layer() -> None:
    layers = "--num-layers 2 --num-experts 8 12 --moe-router-topk 2 --moe-router-group-topk 2 --moe-router-num-groups "
    assert small(layers + "4").model.moe_router_num_groups == 4
    with pytest.raises(ConfigError, match="--num-experts 12 cannot be divided .* Use --moe-router-num-groups 4"):
        small(layers + "8")


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
        "Experts are balanced over the tokens of a micro-batch, as in Megatron-LM, so that gradients depend on "
        "--micro-batch-size. With --moe-aux-loss-scope global they do not."
    ]
    for told in ("--moe-router-load-balancing-type aux_loss", "--moe-aux-loss-scope sample", "--moe-aux-loss-coeff 0"):
        assert said(f"{EXPERTS} {told}") == []
