"""GPT: names, costs, caches, dropout, and equality of split and whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.errors import ConfigError, DataError
from megatron.model.gpt import (
    FINAL_LAYERNORM,
    OUTPUT_LAYER,
    WORD_EMBEDDINGS,
    gpt_layers,
    whole_logits,
)
from megatron.model.interface.layer_cost import LayerCost
from megatron.model.interface.network import LayerKind, LayerSpec, LayerStack
from megatron.model.interface.step_context import MaskKind, Recompute, StepSettings
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh, standard_axes
from megatron.parallel.shard_spec import shard_spec_of
from tests.helpers.layouts import Layout
from tests.helpers.networks import SEED, build_gpt, forward, mean_loss, tiny_config
from tests.helpers.ranks import run_ranks

MESH = ParallelMesh.single()


def _tokens(batch: int = 3, length: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 101, (batch, length), generator=torch.Generator().manual_seed(seed))


def _ids(batch: int = 3) -> torch.Tensor:
    return torch.arange(batch) * 7 + 5


DOCUMENTS = StepSettings(seed=SEED, restart_positions=True, mask=MaskKind.DOCUMENTS)


def _loss(
    model: LayerStack, tokens: torch.Tensor, ids: torch.Tensor, settings: StepSettings | None = None
) -> torch.Tensor:
    axis = model.layer(OUTPUT_LAYER).axis
    return mean_loss(forward(model, tokens, ids, settings=settings), tokens.roll(-1, dims=1), axis)


def test_names_are_megatron_cores() -> None:
    model = build_gpt(tiny_config(), MESH)
    names = dict(model.named_parameters())
    block = ["input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj", "pre_mlp_layernorm"]
    block += ["mlp.linear_fc1", "mlp.linear_fc2"]
    expected = {"embedding.word_embeddings.weight", "embedding.position_embeddings.weight"}
    for part in [*(f"decoder.layers.{layer}.{name}" for layer in (0, 1) for name in block), FINAL_LAYERNORM]:
        expected |= {f"{part}.weight", f"{part}.bias"}
    assert set(names) == expected
    assert all(parameter.global_name == name for name, parameter in names.items())
    assert shard_spec_of(names["embedding.word_embeddings.weight"]).shape == (101, 32)
    assert shard_spec_of(names["decoder.layers.0.self_attention.linear_qkv.weight"]).shape == (4, 3, 8, 32)
    assert names["decoder.layers.0.self_attention.linear_qkv.weight"].shape == (96, 32)


def test_layer_specs_have_kinds_and_costs() -> None:
    config = tiny_config()
    specs = gpt_layers(config, MESH)
    assert [spec.tied_to for spec in specs] == [None] * 5 + [WORD_EMBEDDINGS]
    assert specs[-1].name == OUTPUT_LAYER
    kinds = [LayerKind.EMBEDDING] * 2 + [LayerKind.BLOCK] * 2 + [LayerKind.NORM, LayerKind.HEAD]
    assert [spec.kind for spec in specs] == kinds
    assert specs[-1].cost == LayerCost(0, flops_per_token=2 * 128 * 32)
    assert specs[2].cost.flops_per_token == 2 * 12 * 32**2
    assert specs[2].cost.flops_per_token_pair == 4 * 32


def test_layers_run_one_by_one_equal_the_network() -> None:
    config, settings = tiny_config(hidden_dropout=0.3), StepSettings(seed=SEED)
    specs = gpt_layers(config, MESH)
    context = settings.context(_ids())
    values: Any = _tokens()
    layers = [LayerStack([spec], seed=SEED) for spec in specs]  # as on pipeline stages: the head has a copy of its own
    for layer in layers:
        values = layer(values, context)
    model = build_gpt(config, MESH)
    assert torch.equal(values, forward(model, _tokens(), _ids()))
    copy = layers[-1].layer(OUTPUT_LAYER).weight
    assert torch.equal(copy, layers[0].layer(WORD_EMBEDDINGS).weight)
    assert copy.global_name == f"{WORD_EMBEDDINGS}.weight"
    assert shard_spec_of(copy).is_tied_copy
    assert model.layer(OUTPUT_LAYER).weight is model.layer(WORD_EMBEDDINGS).weight
    assert not shard_spec_of(model.layer(OUTPUT_LAYER).weight).is_tied_copy
    assert values.shape == (3, 16, 128)
    assert not values[..., 101:].any()
    assert whole_logits(values, MESH.tp, 101).shape == (3, 16, 101)


def _part(rank: int, tp: int, changes: dict[str, Any], recompute: Recompute) -> dict[str, Any]:
    mesh = open_mesh(Layout(tp))
    return _run(mesh, tiny_config(128 * tp, **changes), recompute)


def _run(mesh: ParallelMesh, config: Any, recompute: Recompute = Recompute.NONE) -> dict[str, Any]:
    model = build_gpt(config, mesh)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    settings = StepSettings(seed=SEED, recompute=recompute)
    loss = _loss(model, _tokens(), _ids(), settings)
    loss.backward()
    return {
        "loss": loss.item(),
        "logits": whole_logits(forward(model, _tokens(), _ids(), settings=settings).detach(), mesh.tp, 101),
        "start": start,
        "parts": {name: (_box(value), value.grad) for name, value in model.named_parameters()},
    }


def _box(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[slice, ...], tuple[int, ...]]:
    """Logical shape, the box in it, and the local shape."""
    spec = shard_spec_of(parameter)
    box = tuple(slice(start, stop) for start, stop in zip(spec.start, spec.stop, strict=True))
    return spec.shape, box, spec.local_shape


@pytest.mark.parametrize(
    ("tp", "changes", "recompute"),
    [
        (2, {"attention_dropout": 0.2}, Recompute.NONE),
        (2, {"attention_dropout": 0.0, "kv_channels": 6}, Recompute.BLOCKS),
        (4, {"attention_dropout": 0.0, "hidden_dropout": 0.0, "bias_gelu_fusion": False}, Recompute.NONE),
    ],
)
def test_split_equals_whole(tp: int, changes: dict[str, Any], recompute: Recompute) -> None:
    whole = _run(MESH, tiny_config(**changes))
    for part in run_ranks(_part, tp, tp, changes, recompute):
        assert part["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        torch.testing.assert_close(part["logits"], whole["logits"], rtol=1e-4, atol=1e-5)
        for name, ((shape, box, local_shape), gradient) in part["parts"].items():
            rows = box[0].stop - box[0].start
            start = part["start"][name].view(local_shape)
            expected = whole["start"][name]
            expected_gradient = whole["parts"][name][1]
            if "word_embeddings" in name:  # padded in the whole network too
                expected, expected_gradient = expected[:101], expected_gradient[:101]
            assert torch.equal(start[:rows], expected.reshape(shape)[box]), name
            assert not start[rows:].any()
            torch.testing.assert_close(
                gradient.view(local_shape)[:rows], expected_gradient.reshape(shape)[box], rtol=1e-3, atol=1e-6
            )


def test_micro_batch_size_does_not_change_dropout() -> None:
    model = build_gpt(tiny_config(attention_dropout=0.2, hidden_dropout=0.3), MESH)
    whole = forward(model, _tokens(), _ids())
    for row in range(3):
        alone = forward(model, _tokens()[row : row + 1], _ids()[row : row + 1])
        torch.testing.assert_close(alone[0], whole[row], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(forward(model, _tokens(), _ids() + 1), whole, atol=1e-2)
    assert not torch.allclose(forward(model.eval(), _tokens(), _ids()), whole, atol=1e-2)


def test_recompute_saves_memory() -> None:
    kept = []
    for recompute in (Recompute.NONE, Recompute.BLOCKS):
        model = build_gpt(tiny_config(), MESH)
        seen: list[int] = []

        def count(x: torch.Tensor, seen: list[int] = seen) -> torch.Tensor:
            seen.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            _loss(model, _tokens(), _ids(), StepSettings(seed=SEED, recompute=recompute))
        kept.append(sum(seen))
    assert kept[1] < kept[0] / 2


def test_a_cache_can_be_truncated_and_selected() -> None:
    model = build_gpt(tiny_config(), MESH).eval()
    tokens = _tokens()
    full = forward(model, tokens, _ids())
    caches = model.new_caches(16)
    forward(model, tokens[:, :9], _ids(), caches=caches)
    caches.truncate(6)
    caches.select(torch.tensor([2, 0]))
    rest = forward(model, tokens[[2, 0], 6:], _ids(2), caches=caches)
    torch.testing.assert_close(rest, full[[2, 0], 6:], rtol=1e-4, atol=1e-5)


def test_values_that_do_not_fit_are_rejected() -> None:
    model = build_gpt(tiny_config(), MESH).eval()
    with pytest.raises(DataError, match="17 tokens, but the model has 16 positions"):
        forward(model, _tokens(1, 17), _ids(1))
    caches = model.new_caches(4)
    with pytest.raises(ConfigError, match="5 tokens do not fit into a key-value cache of 4"):
        forward(model, _tokens(1, 5), _ids(1), caches=caches)
    with pytest.raises(DataError, match="greater than the highest possible input id: 101"):
        forward(model, torch.tensor([[101]]), _ids(1))
    caches = model.new_caches(8)
    segments = torch.zeros(1, 2, dtype=torch.int64)
    forward(model, _tokens(1, 2), _ids(1), segments, settings=DOCUMENTS, caches=caches)
    with pytest.raises(ConfigError, match="--reset-attention-mask"):
        forward(model, _tokens(1, 2), _ids(1), segments, settings=DOCUMENTS, caches=caches)
    with pytest.raises(ConfigError, match="layer decoder.layers.7 is not among the 6 layers of this stage"):
        model.layer("decoder.layers.7")


def test_layouts_that_cannot_be_built_are_rejected() -> None:
    mesh = ParallelMesh.at(standard_axes(3, tp=3), 0)
    with pytest.raises(ConfigError, match="4 attention heads .--num-attention-heads 4.* over 3 ranks"):
        build_gpt(tiny_config(129), mesh)
    specs = gpt_layers(tiny_config(), MESH)
    nameless = LayerSpec(WORD_EMBEDDINGS, LayerKind.EMBEDDING, LayerCost(0), nn.Identity)
    with pytest.raises(ConfigError, match="layer embedding.word_embeddings is a Identity, which has no weight"):
        LayerStack([nameless, specs[-1]])
    plain = LayerSpec("decoder.layers.0", LayerKind.BLOCK, LayerCost(0), nn.Identity)
    with pytest.raises(ConfigError, match="--compile: layer decoder.layers.0 is a Identity, which cannot be compiled"):
        LayerStack([plain]).compile_blocks(1, torch.device("cpu"), "inductor")
