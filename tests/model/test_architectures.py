"""Every switch of the architecture: sizes, causality, windows, documents, caches, recompute, half precision, splits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.model.blocks.position import rotary_frequencies
from megatron.model.gpt import gpt_layers, whole_logits
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import MaskKind, Recompute, StepSettings
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_sum
from megatron.parallel.shard_spec import shard_spec_of
from tests.helpers.architectures import ARCHITECTURES, build, config_of
from tests.helpers.layouts import Layout
from tests.helpers.networks import SEED, forward, mean_loss
from tests.helpers.ranks import run_ranks

MESH = ParallelMesh.single()
LENGTH = 16
DOCUMENTS = StepSettings(seed=SEED, restart_positions=True, mask=MaskKind.DOCUMENTS)
EACH = pytest.mark.parametrize("changes", ARCHITECTURES.values(), ids=ARCHITECTURES)


def tokens_of(batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 101, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


IDS = torch.tensor([5, 12])


@EACH
def test_costs_count_the_parameters(changes: dict[str, Any]) -> None:
    for spec in gpt_layers(config_of(changes), MESH):
        own = spec.tied_to is None
        real = sum(shard_spec_of(parameter).box_numel for parameter in LayerStack([spec]).parameters())
        assert spec.cost.parameters == (real if own else 0), spec.name


@EACH
def test_later_tokens_do_not_change_earlier_logits(changes: dict[str, Any]) -> None:
    model, tokens = build(changes).eval(), tokens_of()
    before = forward(model, tokens, IDS)
    other = tokens.clone()
    other[:, 9] = (other[:, 9] + 1) % 101
    after = forward(model, other, IDS)
    torch.testing.assert_close(after[:, :9], before[:, :9], rtol=0, atol=1e-6)
    assert not torch.allclose(after[:, 9], before[:, 9], atol=1e-4)


@EACH
def test_documents_are_independent(changes: dict[str, Any]) -> None:
    model, tokens = build(changes).eval(), tokens_of(1)
    segments = torch.tensor([[3] * 6 + [4] * 10])
    joined = forward(model, tokens, IDS[:1], segments, settings=DOCUMENTS)
    torch.testing.assert_close(joined[:, :6], forward(model, tokens[:, :6], IDS[:1]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(joined[:, 6:], forward(model, tokens[:, 6:], IDS[:1]), rtol=1e-4, atol=1e-5)


@EACH
@pytest.mark.parametrize("steps", [[1] * 16, [5, 1, 1, 4, 1, 4]], ids=["one by one", "pieces"])
def test_cached_generation_equals_the_full_pass(changes: dict[str, Any], steps: list[int]) -> None:
    model, tokens = build(changes).eval(), tokens_of()
    caches = model.new_caches(LENGTH)
    pieces, at = [], 0
    for step in steps:
        pieces.append(forward(model, tokens[:, at : at + step], IDS, caches=caches))
        at += step
    torch.testing.assert_close(torch.cat(pieces, dim=1), forward(model, tokens, IDS), rtol=1e-4, atol=1e-5)


@EACH
def test_recompute_changes_nothing(changes: dict[str, Any]) -> None:
    results = []
    for recompute in Recompute:
        attention_dropout = 0.0 if "softmax_type" in changes else 0.1  # the two cannot be combined
        model = build({**changes, "hidden_dropout": 0.1, "attention_dropout": attention_dropout})
        loss = loss_of(model, StepSettings(seed=SEED, recompute=recompute))
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
    for other in results[1:]:
        assert all(torch.equal(kept, again) for kept, again in zip(results[0], other, strict=True))


@EACH
def test_bfloat16_is_close(changes: dict[str, Any]) -> None:
    expected = loss_of(build(changes))
    found = loss_of(build(changes).bfloat16())
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=0.02)


def test_a_window_hides_what_lies_further_back() -> None:
    model, tokens = build(ARCHITECTURES["window"]).eval(), tokens_of()
    before = forward(model, tokens, IDS)
    other = tokens.clone()
    other[:, 3] = (other[:, 3] + 1) % 101
    after = forward(model, other, IDS)
    reach = 3 + 2 * (4 - 1)  # two blocks, each looking three tokens back
    assert not torch.allclose(after[:, reach], before[:, reach], atol=1e-5)
    torch.testing.assert_close(after[:, reach + 1 :], before[:, reach + 1 :], rtol=0, atol=1e-6)


def test_two_rotated_channels_have_one_frequency_however_long_the_text() -> None:
    scaled = {"rope_scaling_type": "dynamic", "rope_original_max_positions": 8, "rope_scaling_factor": 2.0}
    config = config_of({"position_embedding_type": "rope", "kv_channels": 8, "rotary_percent": 0.25, **scaled})
    frequencies, factor = rotary_frequencies(config, 64)
    assert frequencies.tolist() == [1.0] and factor == 1.0


def loss_of(model: LayerStack, settings: StepSettings | None = None) -> torch.Tensor:
    tokens = tokens_of()
    axis = model.layer("output_layer").axis
    return mean_loss(forward(model, tokens, IDS, settings=settings), tokens.roll(-1, dims=1), axis)


def run_architectures(rank: int, tp: int) -> dict[str, Any]:
    """Loss, logits and every parameter's box and gradient, for every architecture."""
    mesh = open_mesh(Layout(tp)) if tp > 1 else MESH
    found = {}
    for name, changes in ARCHITECTURES.items():
        model = build(changes, mesh)
        loss = loss_of(model)
        loss.backward()
        logits = whole_logits(forward(model, tokens_of(), IDS).detach(), mesh.tp, 101)
        parts = {}
        for key, parameter in model.named_parameters():
            spec = shard_spec_of(parameter)
            box = tuple(slice(first, last) for first, last in zip(spec.start, spec.stop, strict=True))
            for axis in spec.summed_over:
                all_reduce_sum(parameter.grad, axis)
            kept = parameter.grad.view(spec.local_shape)[: box[0].stop - box[0].start]
            parts[key] = spec.shape, box, kept
        found[name] = loss.item(), logits, parts
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tp", [2, 3])
def test_split_equals_whole(tp: int) -> None:
    whole = run_architectures(0, 1)
    for part in run_ranks(run_architectures, tp, tp):
        for name, (loss, logits, parts) in part.items():
            expected_loss, expected_logits, expected_parts = whole[name]
            assert loss == pytest.approx(expected_loss, rel=1e-6), name
            torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-5)
            for key, (shape, box, gradient) in parts.items():
                expected = expected_parts[key][2].reshape(shape)[box]
                torch.testing.assert_close(
                    gradient, expected, rtol=1e-3, atol=2e-6, msg=lambda text, at=(name, key): f"{at}: {text}"
                )
