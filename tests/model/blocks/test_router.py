"""Weights in every mode, losses by their formulas, statistics by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.model.blocks.router import (
    BALANCE_LOSS,
    ENTROPY,
    PASSES,
    Z_LOSS,
    ExpertLoad,
    Router,
    RouterLosses,
    Routing,
    balance_loss,
    expert_tokens,
    router_metric_sizes,
    z_loss,
)
from megatron.model.interface.auxiliary import AuxiliaryLosses
from megatron.model.interface.step_state import named_states
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.networks import tiny_config

LOGITS = torch.tensor([[2.0, -1.0, 1.0, 0.0], [-0.5, 3.0, 0.0, 2.5]])


def route(**changes: Any) -> Routing:
    """The routing of the tokens whose logits are LOGITS, of which the best two are 0 and 2, and 1 and 3."""
    router = Router(tiny_config(**{"hidden_size": 4, "num_attention_heads": 2, "num_experts": 4, **changes}),
                    ParallelMesh.single())  # fmt: skip
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    return router(LOGITS)


# Weights of logits 2, 1, 0, -1 by score function, --moe-router-pre-softmax, --moe-router-topk and
# --moe-router-keep-scores; without the last, those of megatron-core's `topk_routing_with_score_function`.
WEIGHTS = {
    ("softmax", False, 2, False): [0.731059, 0.268941],
    ("softmax", False, 4, False): [0.643914, 0.236883, 0.087144, 0.032059],
    ("softmax", True, 1, False): [0.643914],
    ("softmax", True, 2, False): [0.643914, 0.236883],
    ("sigmoid", False, 1, False): [0.880797],
    ("sigmoid", True, 1, False): [0.880797],
    ("sigmoid", False, 2, False): [0.546449, 0.453551],
    ("sigmoid", True, 2, False): [0.546449, 0.453551],
    ("sigmoid", True, 4, False): [0.369959, 0.307065, 0.210014, 0.112963],
    ("sigmoid", False, 2, True): [0.880797, 0.731059],
    ("sigmoid", True, 2, True): [0.880797, 0.731059],
}  # fmt: skip


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("bias", [None, [0.0] * 4])
@pytest.mark.parametrize("combination", WEIGHTS, ids=str)
def test_weights_of_every_combination(
    combination: tuple[str, bool, int, bool], bias: list[float] | None, factor: float
) -> None:
    function, is_before, top_k, keeps = combination
    routing = routed(
        [[2.0, 1.0, 0.0, -1.0]], bias, moe_router_score_function=function, moe_router_pre_softmax=is_before,
        moe_router_topk=top_k, moe_router_keep_scores=keeps, moe_router_topk_scaling_factor=factor,
    )  # fmt: skip
    expected = torch.tensor([WEIGHTS[combination]]) * factor
    torch.testing.assert_close(routing.weights, expected, atol=1e-5, rtol=1e-5)
    assert routing.experts.tolist() == [list(range(top_k))]


def test_large_sigmoids_are_distinguished_by_their_logits() -> None:
    router = Router(
        tiny_config(hidden_size=4, num_attention_heads=2, num_experts=4, moe_router_score_function="sigmoid"),
        ParallelMesh.single(),
    )
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    routing = router(torch.tensor([[40.0, 50.0, 45.0, 60.0]]))
    assert routing.experts.tolist() == [[3, 1]]


def routed(scores: list[list[float]], bias: list[float] | None = None, **changes: Any) -> Routing:
    """The routing of tokens with these logits."""
    count = len(scores[0])
    settings = {"hidden_size": count, "num_attention_heads": 1, "num_experts": count, **changes}
    settings["moe_router_enable_expert_bias"] = bias is not None
    router = Router(tiny_config(**settings), ParallelMesh.single())
    with torch.no_grad():
        router.weight.copy_(torch.eye(count))
        if bias is not None:
            router.expert_bias.copy_(torch.tensor(bias))
    return router(torch.tensor(scores))


@pytest.mark.parametrize("function", ["sigmoid", "softmax"])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_bias_changes_the_choice_and_not_the_weights(function: str, keeps: bool) -> None:
    logits = [[2.0, -1.0, 1.0, 0.0]]
    settings = {"moe_router_pre_softmax": keeps, "moe_router_keep_scores": keeps}
    routing = routed(logits, [0.0, 0.0, -1.0, 0.0], moe_router_score_function=function, **settings)
    assert routing.experts.tolist() == [[0, 3]]
    scores = torch.tensor(logits).sigmoid() if function == "sigmoid" else torch.tensor(logits).softmax(dim=1)
    expected = scores[:, [0, 3]]
    torch.testing.assert_close(routing.weights, expected if keeps else expected / expected.sum(dim=1, keepdim=True))
    unchanged = routed(logits, [0.0] * 4, moe_router_score_function=function)
    assert unchanged.experts.tolist() == [[0, 2]]


def test_experts_lie_in_the_groups_whose_best_ones_have_the_largest_sum() -> None:
    logits = [[3.0, -9.0, 2.0, 1.9, 0.0, 0.1], [0.1, 0.0, -1.0, -1.0, 2.0, -5.0]]
    settings = {"moe_router_score_function": "sigmoid", "moe_router_num_groups": 3}
    assert routed(logits, moe_router_group_topk=1, **settings).experts.tolist() == [[2, 3], [0, 1]]
    assert routed(logits, moe_router_group_topk=2, **settings).experts.tolist() == [[0, 2], [4, 0]]
    best = routed(logits, moe_router_group_topk=1, moe_router_group_scored_experts=1, **settings)
    assert best.experts.tolist() == [[0, 1], [4, 5]]
    biased = routed(logits, [0.0, 0.0, -0.9, 0.0, 0.0, 0.0], moe_router_group_topk=1, **settings)
    assert biased.experts.tolist() == [[5, 4], [0, 1]]


def test_the_state_follows_the_load_of_a_step_that_was_applied() -> None:
    config = tiny_config(
        num_experts=4, moe_router_enable_expert_bias=True, moe_aux_loss_coeff=0.1, moe_aux_loss_scope="global",
        moe_router_bias_update_rate=0.25,
    )  # fmt: skip
    router = Router(config, ParallelMesh.single(), layer=1)
    bias, shares = router.expert_bias, router.expert_shares
    counts = {expert_tokens(1): torch.tensor([5.0, 1.0, 3.0, 3.0], dtype=torch.float64)}
    router.after_step(counts, torch.tensor(False))
    assert bias is not None and bias.tolist() == [0.0] * 4
    assert shares is not None and shares.tolist() == [0.25] * 4
    for _ in range(2):
        router.after_step(counts, torch.tensor(True))
    assert router.expert_bias is bias and bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    torch.testing.assert_close(shares, torch.tensor([5 / 12, 1 / 12, 0.25, 0.25]))


def test_state_stays_in_float32_and_is_no_parameter() -> None:
    router = Router(tiny_config(num_experts=4, moe_router_enable_expert_bias=True), ParallelMesh.single())
    state = router.expert_bias
    assert state is not None
    state.fill_(1 + 2.0**-20)
    router.bfloat16()
    assert router.expert_bias is state and state.dtype is torch.float32 and state[0].item() == 1 + 2.0**-20
    assert [name for name, _ in router.named_parameters()] == ["weight"]
    assert [name for name, _ in named_states(router)] == ["expert_bias"]


def test_half_precision_is_routed_in_float32() -> None:
    router = Router(tiny_config(num_experts=8), ParallelMesh.single()).bfloat16()
    torch.nn.init.normal_(router.weight)
    hidden = torch.randn(5, 32).bfloat16()
    routing = router(hidden)
    assert routing.logits.dtype is routing.weights.dtype is torch.float32
    assert torch.equal(routing.logits, hidden.float() @ router.weight.detach().float().t())


def test_the_balance_loss_of_samples_is_the_mean_of_theirs() -> None:
    probabilities = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.2, 0.8], [0.1, 0.9]])
    counts = torch.tensor([[2, 0], [1, 1]])
    expected = (2 * 0.65 + 1.0) / 2
    assert balance_loss(probabilities, counts).item() == pytest.approx(expected)
    routing = Routing(probabilities.log(), torch.tensor([[0], [0], [0], [1]]), torch.ones(4, 1))
    losses = AuxiliaryLosses()
    config = tiny_config(num_experts=2, moe_router_topk=1, moe_router_pre_softmax=True, moe_aux_loss_scope="sample")
    RouterLosses(config, 0).attach(torch.zeros(2, 2, 4), routing, ExpertLoad(torch.tensor([3, 1])), losses)
    assert losses.sums()[BALANCE_LOSS].item() == pytest.approx(expected)


@pytest.mark.parametrize("scope", ["micro_batch", "sample"])
def test_the_balance_loss_counts_the_best_by_score_whatever_bias_and_groups_choose(scope: str) -> None:
    scores = [[2.0, 1.0, 0.0, -1.0], [1.0, 2.0, -1.0, 0.0]]
    expected = balance_loss(torch.tensor(scores).softmax(1), torch.tensor([2, 2, 0, 0]))
    for changes in ({"moe_router_enable_expert_bias": True}, {"moe_router_num_groups": 2, "moe_router_group_topk": 2}):
        config = tiny_config(num_experts=4, moe_aux_loss_scope=scope, moe_aux_loss_coeff=0.1, **changes)
        chosen = Routing(torch.tensor(scores), torch.tensor([[2, 3], [0, 2]]), torch.ones(2, 2))
        losses = AuxiliaryLosses()
        load = ExpertLoad(torch.tensor([1, 0, 2, 1]))
        RouterLosses(config, 0).attach(torch.zeros(1, 2, 4), chosen, load, losses)
        assert losses.sums()[BALANCE_LOSS].item() == pytest.approx(expected.item())


def test_statistics_are_recorded_under_the_names_that_the_network_lists() -> None:
    config = tiny_config(num_layers=3, num_experts=4, moe_layer_pattern=(0, 1, 1), moe_z_loss_coeff=0.5)
    losses = AuxiliaryLosses()
    counts = torch.tensor([1, 1, 1, 1])
    for layer in (1, 2):
        RouterLosses(config, layer).attach(torch.zeros(1, 2, 4), route(), ExpertLoad(counts), losses)
    recorded = losses.sums()
    sizes = router_metric_sizes(config)
    assert sizes == {BALANCE_LOSS: 1, Z_LOSS: 1, ENTROPY: 1, PASSES: 1, expert_tokens(1): 4, expert_tokens(2): 4}
    assert {name: recorded[name].numel() for name in sizes} == sizes
    probabilities = LOGITS.softmax(1)
    assert recorded[PASSES].item() == 2
    assert recorded[ENTROPY].item() == pytest.approx(2 * -(probabilities * probabilities.log()).sum(1).mean().item())
    assert recorded[BALANCE_LOSS].item() == pytest.approx(2 * balance_loss(probabilities, counts).item())
    assert recorded[Z_LOSS].item() == pytest.approx(2 * z_loss(LOGITS).item())
    assert torch.equal(recorded[expert_tokens(1)], counts)


def test_losses_without_a_coefficient_are_recorded_but_not_attached() -> None:
    losses = AuxiliaryLosses()
    routing, hidden = route(moe_aux_loss_coeff=0.0), torch.zeros(1, 2, 4, requires_grad=True)
    config = tiny_config(num_experts=4, moe_aux_loss_coeff=0.0)
    assert RouterLosses(config, 0).attach(hidden, routing, ExpertLoad(torch.tensor([1, 1, 1, 1])), losses) is hidden
    assert not losses.sums()[BALANCE_LOSS].requires_grad and losses.sums()[BALANCE_LOSS] > 0
