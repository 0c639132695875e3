"""Parameters of networks, from the configuration alone."""

from __future__ import annotations

from megatron.model.costs import idle_expert_parameters
from tests.train.samples import model_config


def test_the_experts_that_a_token_does_not_go_to() -> None:
    assert idle_expert_parameters(model_config()) == 0
    model = model_config(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=5, gated_linear_unit=True)
    assert idle_expert_parameters(model) == 2 * 6 * 3 * 12 * 5  # layers, idle experts, matrices, hidden, width
    model = model_config(num_experts=8, moe_expert_counts=(4, 8), moe_router_topk=1, moe_router_pre_softmax=True,
                         moe_ffn_hidden_size=5)  # fmt: skip
    assert idle_expert_parameters(model) == (3 + 7) * 2 * 12 * 5
