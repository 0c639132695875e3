"""GPT: names, causality, segments, caches, dropout, recompute, and equality of split and whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from megatron.errors import ConfigError, DataError
from megatron.model.attention import segment_mask
from megatron.model.embedding import restarted_positions, word_logits
from megatron.model.gpt import (
    FINAL_LAYERNORM,
    OUTPUT_LAYER,
    WORD_EMBEDDINGS,
    DenseGPT,
    LayerSpec,
    build_dense,
    gpt_layers,
    initial_std,
    language_model_loss,
    whole_logits,
)
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import Axis, ParallelMesh, standard_axes
from megatron.parallel.placement import placement_of
from tests.helpers.layouts import Layout
from tests.helpers.ranks import run_ranks
from tests.model.configs import tiny_config

MESH = ParallelMesh.single()


def _tokens(batch: int = 3, length: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 101, (batch, length), generator=torch.Generator().manual_seed(seed))


def _ids(batch: int = 3) -> torch.Tensor:
    return torch.arange(batch) * 7 + 5


def _loss(model: DenseGPT, axis: Axis, tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    labels = tokens.roll(-1, dims=1)
    return language_model_loss(model(tokens, ids), labels, torch.ones(labels.shape), axis, 101) / labels.numel()


def test_names_are_megatron_cores() -> None:
    model = build_dense(tiny_config(), MESH)
    names = dict(model.named_parameters())
    block = ["input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj", "pre_mlp_layernorm"]
    block += ["mlp.linear_fc1", "mlp.linear_fc2"]
    expected = {"embedding.word_embeddings.weight", "embedding.position_embeddings.weight"}
    for part in [*(f"decoder.layers.{layer}.{name}" for layer in (0, 1) for name in block), FINAL_LAYERNORM]:
        expected |= {f"{part}.weight", f"{part}.bias"}
    assert set(names) == expected
    assert all(parameter.global_name == name for name, parameter in names.items())
    assert placement_of(names["embedding.word_embeddings.weight"]).shape == (101, 32)
    specs = gpt_layers(tiny_config(), MESH)
    assert [spec.tied_to for spec in specs] == [None] * 5 + [WORD_EMBEDDINGS]
    assert specs[-1].name == OUTPUT_LAYER


def test_list_of_layers_is_the_dense_model() -> None:
    config = tiny_config(hidden_dropout=0.3)
    specs = gpt_layers(config, MESH)
    built = [spec.build() for spec in specs]
    values: Any = (_tokens(), _ids())
    for layer in built[:-1]:
        values = layer(values)
    logits = word_logits(built[-1], values[0])
    model = build_dense(config, MESH)
    assert torch.equal(logits, model(_tokens(), _ids()))
    assert torch.equal(built[-1].weight, built[0].weight)
    assert logits.shape == (3, 16, 128)
    assert not logits[..., 101:].any()
    assert whole_logits(logits, MESH.tp, 101).shape == (3, 16, 101)


def test_initial_values() -> None:
    config = tiny_config(num_layers=8, hidden_size=64)
    weights = dict(build_dense(config, MESH).named_parameters())
    for name, parameter in weights.items():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "layernorm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            rows = parameter[:101] if "word" in name else parameter
            assert rows.std().item() == pytest.approx(initial_std(config, name), rel=0.1)
    assert initial_std(config, "decoder.layers.0.mlp.linear_fc2.weight") == pytest.approx(0.1 / math.sqrt(16))
    assert not torch.equal(
        weights["decoder.layers.0.mlp.linear_fc1.weight"], weights["decoder.layers.1.mlp.linear_fc1.weight"]
    )


def _part(rank: int, tp: int, changes: dict[str, Any]) -> dict[str, Any]:
    mesh = open_mesh(Layout(tp))
    return _run(mesh, tiny_config(128 * tp, **changes))


def _run(mesh: ParallelMesh, config: Any) -> dict[str, Any]:
    model = build_dense(config, mesh)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    loss = _loss(model, mesh.tp, _tokens(), _ids())
    loss.backward()
    return {
        "loss": loss.item(),
        "logits": whole_logits(model(_tokens(), _ids()).detach(), mesh.tp, 101),
        "start": start,
        "parts": {name: (placement_of(value), value.grad) for name, value in model.named_parameters()},
    }


@pytest.mark.parametrize(
    ("tp", "changes"),
    [
        (2, {"attention_dropout": 0.2}),
        (2, {"attention_dropout": 0.0, "checkpoint_activations": True, "kv_channels": 6}),
        (4, {"attention_dropout": 0.0, "hidden_dropout": 0.0, "bias_gelu_fusion": False}),
    ],
)
def test_split_equals_dense(tp: int, changes: dict[str, Any]) -> None:
    whole = _run(MESH, tiny_config(**changes))
    for part in run_ranks(_part, tp, tp, changes):
        assert part["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        torch.testing.assert_close(part["logits"], whole["logits"], rtol=1e-4, atol=1e-5)
        for name, (placement, gradient) in part["parts"].items():
            box = tuple(slice(start, stop) for start, stop in zip(placement.start, placement.stop, strict=True))
            rows = placement.box_shape[0]
            assert torch.equal(part["start"][name][:rows], whole["start"][name][box]), name
            assert not part["start"][name][rows:].any()
            torch.testing.assert_close(gradient[:rows], whole["parts"][name][1][box], rtol=1e-3, atol=1e-6)


def test_replicated_gradients_are_identical_on_all_ranks() -> None:
    one, other = run_ranks(_part, 2, 2, {"attention_dropout": 0.0})
    for name, (placement, gradient) in one["parts"].items():
        assert placement.split or torch.equal(gradient, other["parts"][name][1]), name


@pytest.mark.parametrize("reset", [False, True])
def test_later_tokens_do_not_change_earlier_logits(reset: bool) -> None:
    model = build_dense(tiny_config(), MESH, reset_attention_mask=reset, reset_position_ids=reset).eval()
    tokens = _tokens()
    segments = (torch.arange(16) // 6).expand(3, 16).contiguous()
    before = model(tokens, _ids(), segments)
    for changed in (0, 5, 15):
        other = tokens.clone()
        other[:, changed] = (other[:, changed] + 1) % 101
        after = model(other, _ids(), segments.clone())
        torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=0, atol=1e-6)
        assert not torch.allclose(after[:, changed], before[:, changed], atol=1e-3)


def test_segments_are_independent_documents() -> None:
    model = build_dense(tiny_config(), MESH, reset_attention_mask=True, reset_position_ids=True).eval()
    tokens = _tokens(1)
    segments = torch.tensor([[3] * 6 + [4] * 10])
    joined = model(tokens, _ids(1), segments)
    torch.testing.assert_close(joined[:, :6], model(tokens[:, :6], _ids(1)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(joined[:, 6:], model(tokens[:, 6:], _ids(1)), rtol=1e-4, atol=1e-5)
    ignoring = build_dense(tiny_config(), MESH).eval()  # segments present but not asked for
    assert torch.equal(ignoring(tokens, _ids(1), segments), ignoring(tokens, _ids(1)))


def test_positions_and_mask_of_segments() -> None:
    segments = torch.tensor([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 5, 5]])
    assert restarted_positions(segments).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    mask = segment_mask(segments)
    assert mask.shape == (2, 1, 6, 6)
    assert mask[0, 0, 4].tolist() == [False, False, True, True, True, False]
    assert segment_mask(segments) is mask
    segments[0, 0] = 9  # a changed tensor is read again
    assert segment_mask(segments)[0, 0, 1].tolist() == [False, True, False, False, False, False]


def test_micro_batch_size_does_not_change_dropout() -> None:
    model = build_dense(tiny_config(attention_dropout=0.2, hidden_dropout=0.3), MESH)
    together = model(_tokens(), _ids())
    for row in range(3):
        alone = model(_tokens()[row : row + 1], _ids()[row : row + 1])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(_tokens(), _ids() + 1), together, atol=1e-2)
    assert not torch.allclose(model.eval()(_tokens(), _ids()), together, atol=1e-2)


@pytest.mark.parametrize("changes", [{"checkpoint_activations": True}, {"recompute_granularity": "selective"}])
def test_recompute_changes_nothing(changes: dict[str, Any]) -> None:
    results = []
    for settings in ({}, changes):
        model = build_dense(tiny_config(attention_dropout=0.2, hidden_dropout=0.2, **settings), MESH)
        torch.manual_seed(len(results))  # the state of torch's generator must not matter
        loss = _loss(model, MESH.tp, _tokens(), _ids())
        loss.backward()
        results.append((loss, [parameter.grad for parameter in model.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))


def test_recompute_keeps_less() -> None:
    kept = []
    for recompute in (False, True):
        model = build_dense(tiny_config(checkpoint_activations=recompute), MESH)
        seen: list[int] = []

        def count(x: torch.Tensor, seen: list[int] = seen) -> torch.Tensor:
            seen.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            _loss(model, MESH.tp, _tokens(), _ids())
        kept.append(sum(seen))
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize("steps", [[16], [1] * 16, [5, 1, 1, 4, 1, 4]])
def test_cached_generation_equals_the_full_pass(steps: list[int]) -> None:
    model = build_dense(tiny_config(), MESH).eval()
    tokens = _tokens()
    full = model(tokens, _ids())
    caches = model.new_caches(16)
    pieces, at = [], 0
    for step in steps:
        pieces.append(model(tokens[:, at : at + step], _ids(), caches=caches))
        at += step
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, rtol=1e-4, atol=1e-5)
    assert [cache.length for cache in caches] == [16, 16]


def test_cache_can_be_cut_and_selected() -> None:
    model = build_dense(tiny_config(), MESH).eval()
    tokens = _tokens()
    full = model(tokens, _ids())
    caches = model.new_caches(16)
    model(tokens[:, :9], _ids(), caches=caches)
    for cache in caches:
        cache.truncate(6)
        cache.select(torch.tensor([2, 0]))
    rest = model(tokens[[2, 0], 6:], _ids(2), caches=caches)
    torch.testing.assert_close(rest, full[[2, 0], 6:], rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    model = build_dense(tiny_config(), MESH).eval()
    with pytest.raises(DataError, match="17 tokens and there are 16 positions"):
        model(_tokens(1, 17), _ids(1))
    caches = model.new_caches(4)
    with pytest.raises(ConfigError, match="5 tokens do not fit into a cache of 4"):
        model(_tokens(1, 5), _ids(1), caches=caches)
    with pytest.raises(DataError, match="greater than the highest possible input id: 101"):
        model(torch.tensor([[101]]), _ids(1))
    separate = build_dense(tiny_config(), MESH, reset_attention_mask=True).eval()
    caches = separate.new_caches(8)
    segments = torch.zeros(1, 2, dtype=torch.int64)
    separate(_tokens(1, 2), _ids(1), segments, caches=caches)
    with pytest.raises(ConfigError, match="--reset-attention-mask"):
        separate(_tokens(1, 2), _ids(1), segments, caches=caches)


def test_layouts_that_cannot_be_built_are_refused() -> None:
    mesh = ParallelMesh.at(standard_axes(3, tp=3), rank=0)
    with pytest.raises(ConfigError, match="4 attention heads .--num-attention-heads 4.* over 3 ranks"):
        build_dense(tiny_config(129), mesh)
    stages = ParallelMesh.at(standard_axes(2, pp=2), rank=0)
    with pytest.raises(ConfigError, match="--pipeline-model-parallel-size 2"):
        build_dense(tiny_config(), stages)
    wrong = DenseGPT([LayerSpec(WORD_EMBEDDINGS, nn.Identity)])
    with pytest.raises(ConfigError, match="is a Identity"):
        _ = wrong.word_embeddings


def test_bfloat16_runs_and_its_loss_is_close() -> None:
    config = tiny_config(hidden_dropout=0.1, attention_dropout=0.0)
    single, half = build_dense(config, MESH), build_dense(config, MESH).bfloat16()
    one, other = _loss(single, MESH.tp, _tokens(), _ids()), _loss(half, MESH.tp, _tokens(), _ids())
    other.backward()
    assert other.dtype == torch.float32
    assert other.item() == pytest.approx(one.item(), rel=0.01)


def test_gelu_forms_differ() -> None:
    tanh, exact = (build_dense(tiny_config(bias_gelu_fusion=fused), MESH).eval() for fused in (True, False))
    named = build_dense(tiny_config(bias_gelu_fusion=False, openai_gelu=True), MESH).eval()
    assert torch.equal(tanh(_tokens(), _ids()), named(_tokens(), _ids()))
    assert not torch.equal(tanh(_tokens(), _ids()), exact(_tokens(), _ids()))
