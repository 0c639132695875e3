"""Multi-token prediction against the equations of its paper, written out with nothing of ours."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.gpt import MULTI_TOKEN, OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.model.interface.step_context import StepSettings
from tests.helpers.networks import SEED, build_gpt, tiny_config

SHAPE = {"normalization": "RMSNorm", "position_embedding_type": "rope", "hidden_dropout": 0.0, "attention_dropout": 0.0}
DEPTHS, HEADS, LENGTH = 2, 4, 9


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Halves of a head rotated by their position. Shapes: `[b, a, s, d]`."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
    )


def plain_depth(
    parameters: dict[str, torch.Tensor], hidden: torch.Tensor, embedded: torch.Tensor, depth: int
) -> torch.Tensor:
    """Equations 21 and 22, and the norm before the head."""

    def weight(name: str) -> torch.Tensor:
        return parameters[f"mtp.layers.{depth}.{name}"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight(f"{name}.weight"), 1e-5)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weight(f"{name}.weight"), weight(f"{name}.bias"))

    joined = torch.cat((norm(embedded, "enorm"), norm(hidden, "hnorm")), dim=-1)
    state = joined @ weight("eh_proj.weight").t()
    block = "transformer_layer."
    mixed = linear(norm(state, block + "input_layernorm"), block + "self_attention.linear_qkv")
    query, key, value = mixed.unflatten(-1, (HEADS, 3, -1)).permute(3, 0, 2, 1, 4)  # [b, a, s, d]
    scores = rotated(query) @ rotated(key).transpose(-1, -2) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -math.inf)
    attended = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    state = state + linear(attended, block + "self_attention.linear_proj")
    inner = linear(norm(state, block + "pre_mlp_layernorm"), block + "mlp.linear_fc1")
    state = state + linear(F.gelu(inner, approximate="tanh"), block + "mlp.linear_fc2")
    return norm(state, "final_layernorm")


@pytest.mark.parametrize("is_tied", [True, False])
def test_states_and_gradients_equal_the_equations(is_tied: bool) -> None:
    model = build_gpt(
        tiny_config(mtp_num_layers=DEPTHS, untie_embeddings_and_output_weights=not is_tied, **SHAPE)
    ).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    tokens = torch.randint(0, 101, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    start = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(3))
    context = StepSettings(seed=SEED, has_tokens=True).context(torch.arange(2), tokens=tokens)

    hidden = start.clone().requires_grad_()
    states = model.layer(MULTI_TOKEN)(hidden, context)
    logits = model.layer(OUTPUT_LAYER)(states, context)
    logits.square().mean().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    parameters = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in model.named_parameters()}
    table = parameters[f"{WORD_EMBEDDINGS}.weight"]
    other = start.clone().requires_grad_()
    depths = [other]
    for depth in range(DEPTHS):
        later = F.pad(tokens[:, depth + 1 :], (0, depth + 1))
        depths.append(plain_depth(parameters, depths[-1], table[later], depth))
    head = table if is_tied else parameters[f"{OUTPUT_LAYER}.weight"]
    expected = torch.cat(depths) @ head.t()
    expected.square().mean().backward()

    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, other.grad, rtol=1e-4, atol=1e-8)
    assert {name for name in found if name.startswith("mtp.")} == {name for name in parameters if "mtp." in name}
    assert found.keys() == {name for name, parameter in parameters.items() if parameter.grad is not None}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, parameters[name].grad, rtol=1e-4, atol=1e-8, msg=name)


def test_outside_of_training_it_changes_nothing() -> None:
    model = build_gpt(tiny_config(mtp_num_layers=1, **SHAPE)).eval()
    hidden = torch.randn(2, LENGTH, 32)
    assert model.layer(MULTI_TOKEN)(hidden, StepSettings().context(torch.arange(2))) is hidden


def test_it_needs_the_tokens() -> None:
    model = build_gpt(tiny_config(mtp_num_layers=1, **SHAPE))
    with pytest.raises(ValueError, match="requires StepSettings.has_tokens"):
        model.layer(MULTI_TOKEN)(torch.randn(2, LENGTH, 32), StepSettings().context(torch.arange(2)))
