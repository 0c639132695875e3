"""Encoders against BERT in plain PyTorch; what a token sees; initial values, and generation refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.errors import ConfigError
from megatron.model.bert import bert_layers
from megatron.model.interface.key_value_cache import BatchCaches
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import MaskKind, StepContext, StepSettings
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import shard_spec_of
from tests.helpers.networks import SEED, tiny_config
from tests.parity.plain_bert import MaskedText, encode, masked_text, predict
from tests.parity.reference import Recipe

MESH = ParallelMesh.single()
RECIPE = Recipe(num_layers=2, vocab_size=101)
BERT: dict[str, Any] = {
    "bidirectional": True, "token_types": 2, "masked_lm_head": True, "sentence_order_head": True,
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
ORIGINAL = {**BERT, "norm_placement": "post", "embed_layernorm": True}
POSITIONS: dict[str, dict[str, Any]] = {
    "learned": {},
    "rotary": {"position_embedding_type": "rope"},
    "alibi": {"position_embedding_type": "alibi"},
    "window": {"attention_window": 3},
}


def build(changes: dict[str, Any]) -> LayerStack:
    """An encoder whose vectors are not at their initial values, which would hide them."""
    stack = LayerStack(bert_layers(tiny_config(**changes), MESH), seed=SEED)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in stack.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return stack


def context_of(text: MaskedText, predicted: bool = False) -> StepContext:
    settings = StepSettings(mask=MaskKind.DOCUMENTS, has_token_types=True, has_predicted=predicted)
    return settings.context(
        torch.arange(len(text.tokens)),
        text.segments,
        token_types=text.types,
        predicted=text.predicted if predicted else None,
    )


@pytest.mark.parametrize("is_original", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_network_equals_plain_torch(is_original: bool, dtype: torch.dtype) -> None:
    stack, text = build(ORIGINAL if is_original else BERT).to(dtype), masked_text(RECIPE, 0)
    weights = {parameter.global_name: parameter.detach().double() for parameter in stack.parameters()}
    weights["embedding.word_embeddings.weight"] = weights["embedding.word_embeddings.weight"][:101]
    weights["output_layer.bias"] = weights["output_layer.bias"][:101]
    expected, expected_order = predict(weights, encode(weights, text, RECIPE, post=is_original), RECIPE)
    logits, order = stack(text.tokens, context_of(text))
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype is torch.float64 else {"rtol": 0.05, "atol": 0.08}
    torch.testing.assert_close(logits[..., :101].double(), expected, **tolerance)
    torch.testing.assert_close(order.double(), expected_order, **tolerance)
    some, _ = stack(text.tokens, context_of(text, predicted=True))
    rows = text.predicted.unsqueeze(-1).expand(-1, -1, 101)
    torch.testing.assert_close(some[..., :101].double(), expected.gather(1, rows), **tolerance)


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_token_sees_its_whole_segment_and_nothing_else(name: str, dropout: float) -> None:
    """With dropout of attention the scores have a bias; without it documents have calls of their own."""
    config = {**BERT, "sentence_order_head": False, "attention_dropout": dropout, **POSITIONS[name]}
    if config.get("attention_window") is not None:
        config["num_layers"] = 1
    stack, length = build(config), 12
    segments = torch.tensor([[0] * 8 + [1] * 4])
    tokens = torch.arange(length)[None].repeat(length + 1, 1)
    tokens[1:].diagonal().add_(50)
    ids = torch.zeros(length + 1, dtype=torch.int64)  # the same dropout in every row
    context = StepSettings(SEED, mask=MaskKind.DOCUMENTS).context(ids, segments.expand_as(tokens))
    with torch.no_grad():
        logits = stack(tokens, context)
    changed = (logits[1:] - logits[:1]).abs().amax(-1) > 1e-5  # [changed place, position]
    places = torch.arange(length)
    seen = segments[0, :, None] == segments[0]
    if name == "window":
        seen &= (places[:, None] - places).abs() < 3
    assert torch.equal(changed, seen)


def test_without_segments_every_token_sees_all() -> None:
    stack = build({**BERT, "sentence_order_head": False})
    tokens = torch.arange(12)[None].repeat(2, 1)
    tokens[1, 11] = 50
    logits = stack(tokens, StepSettings(SEED).context(torch.arange(2)))
    assert ((logits[0] - logits[1]).abs().amax(-1) > 1e-6).all()


def test_initial_values_are_those_of_the_role() -> None:
    stack = LayerStack(
        bert_layers(tiny_config(**BERT, hidden_size=64, use_mup=True, mup_base_hidden_size=16), MESH), seed=SEED
    )
    found = {parameter.global_name: parameter for parameter in stack.parameters()}
    width_ratio = 4
    expected = {
        "embedding.tokentype_embeddings.weight": (0.1, 1),
        "output_layer.lm_head.dense.weight": (0.1 / width_ratio**0.5, 1 / width_ratio),
        "output_layer.pooler.dense.weight": (0.1 / width_ratio**0.5, 1 / width_ratio),
        "output_layer.binary_head.weight": (0.1 / width_ratio, 1 / width_ratio),
    }
    for name, (std, rate) in expected.items():
        assert found[name].std().item() == pytest.approx(std, rel=0.2), name
        assert shard_spec_of(found[name]).lr_multiplier == rate
    assert not found["output_layer.bias"].any()


def test_cached_generation_is_refused() -> None:
    stack = build({**BERT, "sentence_order_head": False})
    context = StepSettings(SEED).context(torch.arange(1), caches=BatchCaches(8))
    with pytest.raises(ConfigError, match="this one is bidirectional"):
        stack(torch.arange(4)[None], context)
