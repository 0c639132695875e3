"""The layer with experts equals a loop over tokens, forward and backward, whole or split over tp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.config import ModelConfig, ParallelRequest
from megatron.errors import ConfigError
from megatron.model.blocks.experts import Experts
from megatron.model.blocks.router import expert_tokens, router_metric_sizes
from megatron.model.costs import experts_cost
from megatron.model.initial_values import place_initial_values
from megatron.model.interface.auxiliary import AuxiliaryLosses
from megatron.model.interface.layer_cost import LayerCost
from megatron.model.interface.network import LayerKind, LayerSpec, draw_initial_values, name_parameters
from megatron.model.interface.step_context import StepContext
from megatron.parallel.expert.exchange import RowExchange
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh, standard_axes
from megatron.parallel.shard_spec import shard_spec_of
from tests.helpers.layouts import Layout
from tests.helpers.networks import tiny_config
from tests.helpers.ranks import run_ranks
from tests.model.blocks.plain_experts import plain_experts

BATCH, LENGTH, LAYER = 3, 7, 1
GATED = {"gated_linear_unit": True, "activation_function": "silu"}
LIMITED = {
    "gated_linear_unit": True, "activation_function": "quick_gelu", "activation_func_clamp_value": 0.4,
    "glu_linear_offset": 1.0,
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {},
    "gated": GATED,
    "softmax of all": {**GATED, "moe_router_pre_softmax": True, "moe_router_topk": 1},
    "biases": {**LIMITED, "moe_mlp_bias": True, "moe_router_bias": True},
    "biases and capacity": {
        "moe_mlp_bias": True, "moe_router_bias": True, "moe_expert_capacity_factor": 1.0, "moe_min_capacity": 0,
        "moe_shared_expert_intermediate_size": 10,
    },
    "sigmoid": {**GATED, "moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5},
    "sigmoid as it is": {"moe_router_score_function": "sigmoid", "moe_router_keep_scores": True},
    "shared": {**GATED, "moe_shared_expert_intermediate_size": 10, "moe_router_topk": 3},
    "without losses": {**GATED, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0},
    "every expert": {"moe_router_topk": 6},
    "capacity": {**GATED, "moe_expert_capacity_factor": 1.0, "moe_min_capacity": 0},
    "first come": {
        "moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position", "moe_min_capacity": 2,
        "moe_shared_expert_intermediate_size": 10, "moe_router_topk": 3,
    },
    "residual": {"moe_residual": True, "moe_router_topk": 1, "moe_router_pre_softmax": True, "ffn_hidden_size": 20},
}  # fmt: skip


def experts_config(**changes: Any) -> ModelConfig:
    settings = {
        "hidden_size": 8, "num_attention_heads": 2, "num_experts": 6, "moe_ffn_hidden_size": 12,
        "activation_function": "gelu_tanh", "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1, "init_method_std": 0.5,
    }  # fmt: skip
    return tiny_config(**{**settings, **changes})


def build(config: ModelConfig, mesh: ParallelMesh | None = None) -> Experts:
    layer = Experts(config, mesh or ParallelMesh.single(), LAYER)
    complete_spec = partial(place_initial_values, config)
    name_parameters(
        LayerSpec("layer", LayerKind.BLOCK, LayerCost(0), lambda: layer, complete_spec=complete_spec), layer
    )
    draw_initial_values(layer, seed=5)
    for place, parameter in enumerate(layer.parameters()):
        spec = shard_spec_of(parameter)
        if not spec.is_matrix:  # a bias starts at zero, where an error in it would hide
            whole = torch.randn(spec.shape, generator=torch.Generator().manual_seed(place))
            box = tuple(slice(*edges) for edges in zip(spec.start, spec.stop, strict=True))
            parameter.data.copy_(whole[box].reshape(parameter.shape))
    return layer


def inputs(config: ModelConfig, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(BATCH, length, config.hidden_size, generator=torch.Generator().manual_seed(3))


def new_context(scale: float = 1.0) -> StepContext:
    return StepContext(torch.arange(BATCH), auxiliary=AuxiliaryLosses(scale))


def gradients(layer: Experts, hidden: torch.Tensor, context: StepContext) -> dict[str, torch.Tensor]:
    """Output and gradients of a weighted sum of the output plus the layer's losses."""
    hidden = hidden.clone().requires_grad_()
    output = layer(hidden, context)
    probe = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype)
    (output * probe).sum().backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": output.detach(), "hidden": hidden.grad, **found}  # type: ignore[dict-item]


def plain_gradients(layer: Experts, hidden: torch.Tensor, config: ModelConfig) -> dict[str, torch.Tensor]:
    weights = {
        name: parameter.detach().double().view(shard_spec_of(parameter).shape).requires_grad_()
        for name, parameter in layer.named_parameters()
    }
    hidden = hidden.double().requires_grad_()
    output, loss = plain_experts(weights, hidden, config)
    probe = torch.linspace(-1, 1, output.numel()).view(output.shape).double()
    ((output * probe).sum() + loss).backward()
    found = {name: weight.grad for name, weight in weights.items()}
    return {"output": output.detach(), "hidden": hidden.grad, **found}  # type: ignore[dict-item]


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], ratio: float = 1.0e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name].reshape(value.shape).double() - value).abs().max()
        assert error <= ratio * value.abs().max().clamp(min=1.0), f"{name}: {error}"


@pytest.mark.parametrize("mode", MODES)
def test_output_and_gradients_are_those_of_a_loop_over_tokens(mode: str) -> None:
    config = experts_config(**MODES[mode])
    layer = build(config)
    hidden = inputs(config)
    expected = plain_gradients(layer, hidden, config)
    check_equal(gradients(layer, hidden, new_context()), expected)
    assert expected["router.weight"].abs().max() > 0.1


def test_a_gradient_scale_scales_the_losses_too() -> None:
    config = experts_config()
    layer, hidden = build(config), inputs(config)
    once = gradients(layer, hidden, new_context())["router.weight"].clone()
    layer.zero_grad()
    more = gradients(layer, hidden, new_context(3.0))["router.weight"].clone()
    quiet = build(experts_config(moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.0))
    main = gradients(quiet, hidden, new_context())["router.weight"]
    torch.testing.assert_close(more - main, 3 * (once - main))


def test_128_experts_of_which_most_are_empty_have_zero_gradients_not_missing_ones() -> None:
    config = experts_config(num_experts=128, moe_router_topk=8, **GATED)
    layer, hidden = build(config), inputs(config, length=1)
    context = new_context()
    found = gradients(layer, hidden, context)
    counts = context.auxiliary.sums()[expert_tokens(LAYER)]
    assert counts.sum() == BATCH * 8 and (counts == 0).sum() > 90
    per_expert = found["experts.linear_fc1.weight"].abs().flatten(1).amax(dim=1)
    assert torch.equal(per_expert > 0, counts > 0)
    check_equal(found, plain_gradients(layer, hidden, config))


def test_tokens_one_at_a_time_are_routed_as_in_a_sequence_and_evaluation_attaches_nothing() -> None:
    config = experts_config(**GATED)
    layer, hidden, context = build(config).eval(), inputs(config), new_context()
    with torch.no_grad():
        whole = layer(hidden, context)
        single = torch.cat([layer(part, context) for part in hidden.split(1, dim=1)], dim=1)
    torch.testing.assert_close(single, whole)
    assert context.auxiliary.sums() == {}


def train_split(rank: int) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, tuple[Any, Any]]]]:
    """Gradients of every mode on this rank, and the place of its parameters."""
    mesh = open_mesh(Layout(2))
    found = {}
    for mode, changes in MODES.items():
        config = experts_config(**changes)
        layer = build(config, mesh)
        places = {name: (spec.start, spec.stop) for name, spec in specs_of(layer).items()}
        found[mode] = (gradients(layer, inputs(config), new_context()), places)
    return found


def specs_of(layer: Experts) -> dict[str, Any]:
    return {name: shard_spec_of(parameter) for name, parameter in layer.named_parameters()}


def test_split_over_tp_equals_whole() -> None:
    ranks = run_ranks(train_split, 2)
    for mode, changes in MODES.items():
        config = experts_config(**changes)
        layer = build(config)
        expected = gradients(layer, inputs(config), new_context())
        for found, places in (rank[mode] for rank in ranks):
            for name, spec in specs_of(layer).items():
                box = tuple(slice(*edges) for edges in zip(*places[name], strict=True))
                part = expected[name].view(spec.shape)[box]
                torch.testing.assert_close(
                    found[name].view(part.shape), part, msg=lambda text, at=(mode, name): f"{at}: {text}"
                )
            for name in ("output", "hidden"):
                torch.testing.assert_close(found[name], expected[name])
        assert any(ranks[0][mode][1][name] != ranks[1][mode][1][name] for name in specs_of(layer))


COLLAPSED = {
    "gated": GATED,
    "shared": {**GATED, "moe_shared_expert_intermediate_size": 10},
    "recomputed": {**GATED, "moe_shared_expert_intermediate_size": 10},
    "biases": {**LIMITED, "moe_mlp_bias": True},
}


def collapsed(mode: str, mesh: ParallelMesh | None = None) -> Experts:
    """A layer whose router sends everything to the first two experts; its losses, which are each rank's, are off."""
    layer = build(experts_config(**COLLAPSED[mode], moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.0), mesh)
    layer.router.weight.data.copy_(torch.arange(6.0).flip(0).unsqueeze(1).expand(6, 8))
    if mode == "recomputed":
        plain = layer.forward
        layer.forward = lambda x, context: checkpoint(plain, x, context, use_reentrant=False)  # type: ignore[method-assign]
    return layer


def order_of_events(mesh: ParallelMesh, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """The order of events in forward and backward: start and end of exchanges, and the shared expert."""
    events: list[str] = []

    def recording(name: str) -> Callable[..., torch.Tensor]:
        plain = getattr(RowExchange, name)

        def call(*args: Any, **options: Any) -> torch.Tensor:
            events.append(name)
            return plain(*args, **options)  # type: ignore[no-any-return]

        return call

    for name in ("begin", "finish"):
        monkeypatch.setattr(RowExchange, name, recording(name))
    layer = collapsed("shared", mesh)
    shared = layer.shared_experts
    assert shared is not None
    shared.register_forward_hook(lambda *_: events.append("shared"))
    shared.linear_fc1.weight.register_hook(lambda _: events.append("shared"))
    output = layer(inputs(experts_config()).abs().requires_grad_(), new_context())
    forward = [*events]
    output.sum().backward()
    return forward, events[len(forward) :]


def divided(rank: int) -> tuple[dict[str, dict[str, torch.Tensor]], tuple[list[str], list[str]]]:
    """Gradients of layers of which the second rank gets no token, and the order of what happens in one."""
    mesh = open_mesh(ParallelRequest(expert_model_parallel_size=2))
    hidden = inputs(experts_config()).abs() + rank
    found = {mode: gradients(collapsed(mode, mesh), hidden, new_context()) for mode in COLLAPSED}
    with pytest.MonkeyPatch.context() as monkeypatch:
        return found, order_of_events(mesh, monkeypatch)


Divided = list[tuple[dict[str, dict[str, torch.Tensor]], tuple[list[str], list[str]]]]


@pytest.fixture(scope="module")
def over_two_ranks() -> Divided:
    """The results of `divided` on each of two ranks."""
    return run_ranks(divided, 2)


def test_over_two_ranks_of_which_one_gets_no_token(over_two_ranks: Divided) -> None:
    for mode in COLLAPSED:
        layer = collapsed(mode)
        alone = [gradients(layer, inputs(experts_config()).abs() + rank, new_context()) for rank in range(2)]
        for rank, (found, _) in enumerate(over_two_ranks):
            for name, value in found[mode].items():
                of_all = alone[0][name]  # the gradients of both passes together
                if name.startswith("experts."):
                    of_all = of_all.chunk(2)[rank]
                elif name in ("output", "hidden"):
                    of_all = alone[rank][name]
                else:
                    continue  # each rank's own part of a sum
                torch.testing.assert_close(value, of_all, msg=lambda text, at=(mode, name): f"{at}: {text}")
        assert over_two_ranks[0][0][mode]["experts.linear_fc1.weight"].any()
        assert not over_two_ranks[1][0][mode]["experts.linear_fc1.weight"].any()


def test_the_shared_expert_computes_while_rows_are_on_their_way(over_two_ranks: Divided) -> None:
    for _, (forward, backward) in over_two_ranks:
        assert forward == ["begin", "shared", "finish", "begin", "finish"]
        assert backward == ["begin", "finish", "begin", "shared", "finish"]


def test_layers_may_have_different_numbers_of_experts() -> None:
    config = experts_config(num_experts=12, moe_expert_counts=(3, 12), moe_router_topk=1, moe_router_pre_softmax=True)
    layers = {index: Experts(config, ParallelMesh.single(), index) for index in range(2)}
    for index, count in enumerate((3, 12)):
        shapes = {name: spec.shape for name, spec in specs_of(layers[index]).items()}
        assert shapes["router.weight"] == (count, 8) and shapes["experts.linear_fc2.weight"] == (count, 8, 12)
        assert experts_cost(config, index).parameters == sum(p.numel() for p in layers[index].parameters())
    assert router_metric_sizes(config)[expert_tokens(0)] == 3
    assert router_metric_sizes(config)[expert_tokens(1)] == 12


@pytest.mark.parametrize("changes", [{}, GATED, {**GATED, "moe_shared_expert_intermediate_size": 10}])
def test_cost_counts_all_parameters_and_the_operations_of_the_chosen_experts(changes: dict[str, Any]) -> None:
    config = experts_config(**changes)
    cost = experts_cost(config)
    assert cost.parameters == sum(parameter.numel() for parameter in build(config).parameters())
    matrices = 3 if config.gated_linear_unit else 2
    active = 6 * 8 + matrices * 8 * (2 * 12 + config.moe_shared_expert_intermediate_size)
    assert cost.flops_per_token == 2 * active


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"moe_ffn_hidden_size": 13}, "13 channels of an expert .--moe-ffn-hidden-size 13"),
        ({"moe_shared_expert_intermediate_size": 7}, "--moe-shared-expert-intermediate-size 7"),
    ],
)
def test_a_width_that_cannot_be_split_is_refused(changes: dict[str, Any], text: str) -> None:
    mesh = ParallelMesh.at(standard_axes(2, tp=2), 0)
    with pytest.raises(ConfigError, match=text):
        Experts(experts_config(**changes), mesh, LAYER)
