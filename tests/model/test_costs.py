"""Parameters of networks, from the configuration alone."""

from __future__ import annotations

from megatron.model.costs import block_cost, chunk_flops, idle_expert_parameters, multi_token_cost
from megatron.model.interface.layer_cost import LayerCost, TokenWork
from megatron.model.multi_token_prediction import MultiTokenPrediction
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.schedule.actions import Placement
from megatron.parallel.schedule.division import BY_COST
from tests.train.samples import model_config


def test_multi_token_prediction_costs_what_is_built_and_passes_through_the_head() -> None:
    changes = {"num_experts": 4, "moe_layer_pattern": (1, 0, 0, 1), "num_layers": 3, "position_embedding_type": "rope"}
    model = model_config(mtp_num_layers=2, **changes)
    cost, block = multi_token_cost(model), block_cost(model, 2)  # blocks like the last one, whatever the pattern says
    built = MultiTokenPrediction(model, ParallelMesh.single())
    assert cost.parameters == sum(parameter.numel() for parameter in built.layers.parameters())
    head, hidden = 2 * model.padded_vocab_size * model.hidden_size, model.hidden_size
    assert cost.flops(5) == 2 * (block.flops(5) + 4 * hidden * hidden + head)
    assert multi_token_cost(model_config()) == LayerCost(0)
    placement, work = Placement.loop(3, 1), TokenWork(5)
    without = chunk_flops(model_config(**changes), work, placement, BY_COST)
    added = sum(chunk_flops(model, work, placement, BY_COST)) - sum(without)
    assert added == cost.flops(5)


def test_the_experts_that_a_token_does_not_go_to() -> None:
    assert idle_expert_parameters(model_config()) == 0
    model = model_config(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=5, gated_linear_unit=True)
    assert idle_expert_parameters(model) == 2 * 6 * 3 * 12 * 5  # layers, idle experts, matrices, hidden, width
    model = model_config(num_experts=8, moe_expert_counts=(4, 8), moe_router_topk=1, moe_router_pre_softmax=True,
                         moe_ffn_hidden_size=5)  # fmt: skip
    assert idle_expert_parameters(model) == (3 + 7) * 2 * 12 * 5
