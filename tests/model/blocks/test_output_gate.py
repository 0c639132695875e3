"""Attention with an output gate is Qwen3-Next's, in values and gradients."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

from megatron.model.blocks.attention import SelfAttention
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.networks import tiny_config

HIDDEN, HEADS, SIZE, LENGTH = 24, 6, 16, 11


@pytest.mark.parametrize("groups", [2, 6, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_is_that_of_transformers(groups: int, bias: bool) -> None:
    theirs, angles = their_layer(groups, bias)
    config = tiny_config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=groups, kv_channels=SIZE,
        normalization="RMSNorm", apply_layernorm_1p=True, layernorm_epsilon=1e-6, qk_layernorm=True,
        attention_output_gate=True, position_embedding_type="rope", rotary_percent=0.25,
        add_bias_linear=bias, attention_dropout=0.0,
    )  # fmt: skip
    ours = SelfAttention(config, ParallelMesh.single(), 0)
    fused = ("weight", "bias") if bias else ("weight",)
    with torch.no_grad():
        for name in fused:
            getattr(ours.linear_qkv, name).copy_(joined(theirs, name, groups, grad=False))
            getattr(ours.linear_proj, name).copy_(getattr(theirs.o_proj, name))
        ours.q_layernorm.weight.copy_(theirs.q_norm.weight)
        ours.k_layernorm.weight.copy_(theirs.k_norm.weight)

    states = torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(2))
    gradient = torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(3))
    inputs = [states.clone().requires_grad_() for _ in range(2)]
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
    expected = theirs(inputs[0], angles, mask)[0]
    found = ours(inputs[1], StepContext(torch.tensor([0, 1])))
    expected.backward(gradient)
    found.backward(gradient)
    pairs = [(found, expected), (inputs[1].grad, inputs[0].grad)]
    pairs += [(getattr(ours.linear_qkv, name).grad, joined(theirs, name, groups, grad=True)) for name in fused]
    pairs += [(getattr(ours.linear_proj, name).grad, getattr(theirs.o_proj, name).grad) for name in fused]
    pairs += [(ours.q_layernorm.weight.grad, theirs.q_norm.weight.grad)]
    pairs += [(ours.k_layernorm.weight.grad, theirs.k_norm.weight.grad)]
    for own, true in pairs:
        assert own is not None and true is not None
        assert (own - true).abs().max() <= 1e-5 * true.abs().max()


def their_layer(groups: int, bias: bool) -> tuple[Qwen3NextAttention, tuple[torch.Tensor, torch.Tensor]]:
    """The layer with random values everywhere, and the rotation of its positions."""
    config = Qwen3NextConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=groups, head_dim=SIZE, attention_bias=bias,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        num_hidden_layers=4, attn_implementation="eager",
    )  # fmt: skip
    layer = Qwen3NextAttention(config, 3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return layer, Qwen3NextRotaryEmbedding(config)(torch.zeros(()), torch.arange(LENGTH)[None])


def joined(layer: Qwen3NextAttention, name: str, groups: int, *, grad: bool) -> torch.Tensor:
    """Their projections, or the gradients of these, as ours: of each group queries, gates, key and value.

    In theirs each head's rows are those of its query and of its gate. Shapes: result `[g * (2a/g + 2) * d, ...]`.
    """
    query, key, value = (
        parameter.grad if grad else parameter
        for parameter in (getattr(part, name) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    )
    queries, gates = query.unflatten(0, (groups, HEADS // groups, 2, SIZE)).unbind(2)
    return torch.cat(
        [queries, gates, key.unflatten(0, (groups, 1, SIZE)), value.unflatten(0, (groups, 1, SIZE))], 1
    ).flatten(0, 2)
