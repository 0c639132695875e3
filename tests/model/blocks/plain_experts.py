"""Mixture of experts the simplest way, token by token in float64; nothing here is shared with the code under test."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from megatron.config import ModelConfig

ACTIVATIONS = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "relu": F.relu,
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
}  # fmt: skip


def plain_experts(
    weights: Mapping[str, torch.Tensor], hidden: torch.Tensor, config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's output and the sum of its losses.

    Shapes: weights as in a checkpoint, such as `[e, 2, f, h]`; hidden `[b, s, h]` to `[b, s, h]` and `[]`.
    """
    tokens = hidden.reshape(-1, hidden.shape[-1])
    rows, all_logits, choices = [], [], []
    chosen = [0] * config.num_experts
    for token in tokens:
        logits = weights["router.weight"] @ token + weights.get("router.bias", 0)
        all_logits.append(logits)
        best = sorted(range(config.num_experts), key=lambda expert: -logits[expert].item())[: config.moe_router_topk]
        choices.append(dict(zip(best, _factors(logits, best, config), strict=True)))
        for expert in best:
            chosen[expert] += 1
    for number, token in enumerate(tokens):
        row = torch.zeros_like(token)
        for expert, factor in choices[number].items():
            if number not in _taken(expert, choices, config):
                continue
            own = {name: value[expert] for name, value in weights.items() if name.startswith("experts.")}
            row = row + factor * _network(token, own, "experts", config)
        if "shared_experts.linear_fc1.weight" in weights:
            row = row + _network(token, weights, "shared_experts", config)
        if config.moe_residual:
            row = _mixed(weights, token, row, config)
        rows.append(row)
    return torch.stack(rows).view(hidden.shape), _losses(all_logits, chosen, config)


def _taken(expert: int, choices: list[dict[int, torch.Tensor]], config: ModelConfig) -> list[int]:
    """The tokens that an expert takes of those that choose it."""
    askers = [token for token, chosen in enumerate(choices) if expert in chosen]
    if config.moe_expert_capacity_factor is None:
        return askers
    if config.moe_token_drop_policy == "probs":
        askers.sort(key=lambda token: -choices[token][expert].item())
    even = len(choices) * config.moe_router_topk / config.num_experts
    return askers[: max(config.moe_min_capacity, math.ceil(config.moe_expert_capacity_factor * even))]


def _mixed(
    weights: Mapping[str, torch.Tensor], token: torch.Tensor, routed: torch.Tensor, config: ModelConfig
) -> torch.Tensor:
    """DeepSpeed's `MoE.forward` with `use_residual`: `coef = softmax(coefficient(x))`,
    `output * coef[0] + mlp(x) * coef[1]`.
    """
    name = "residual.dense.linear_fc"
    inner = weights[f"{name}1.weight"] @ token + weights[f"{name}1.bias"]
    dense = weights[f"{name}2.weight"] @ ACTIVATIONS[config.activation_function](inner) + weights[f"{name}2.bias"]
    scores = weights["residual.coefficient.weight"] @ token + weights["residual.coefficient.bias"]
    first, second = torch.exp(scores[0]), torch.exp(scores[1])
    return (routed * first + dense * second) / (first + second)


def _network(token: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str, config: ModelConfig) -> torch.Tensor:
    function, limit = ACTIVATIONS[config.activation_function], config.activation_func_clamp_value or math.inf
    inner = weights[f"{name}.linear_fc1.weight"] @ token + weights.get(f"{name}.linear_fc1.bias", 0)
    if config.gated_linear_unit:
        gate, up = inner
        inner = function(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + config.glu_linear_offset)
    else:
        inner = function(inner)
    return weights[f"{name}.linear_fc2.weight"] @ inner + weights.get(f"{name}.linear_fc2.bias", 0)


def _factors(logits: torch.Tensor, best: list[int], config: ModelConfig) -> list[torch.Tensor]:
    sigmoid = config.moe_router_score_function == "sigmoid"
    scores = [1 / (1 + torch.exp(-logit)) if sigmoid else torch.exp(logit) for logit in logits]
    divisor = sum(scores[expert] for expert in best)
    if sigmoid and (config.moe_router_keep_scores or len(best) == 1):
        divisor = 1.0
    elif not sigmoid and config.moe_router_pre_softmax:
        divisor = sum(scores)
    return [config.moe_router_topk_scaling_factor * scores[expert] / divisor for expert in best]


def _losses(all_logits: list[torch.Tensor], chosen: list[int], config: ModelConfig) -> torch.Tensor:
    count, choices = len(all_logits), sum(chosen)
    balance = z = torch.zeros((), dtype=torch.float64)
    for logits in all_logits:
        z = z + torch.log(torch.exp(logits).sum()) ** 2 / count
        sigmoid = config.moe_router_score_function == "sigmoid"
        scores = torch.sigmoid(logits) if sigmoid else torch.exp(logits)
        for expert, tokens in enumerate(chosen):
            balance = balance + config.num_experts * (tokens / choices) * scores[expert] / scores.sum() / count
    return config.moe_aux_loss_coeff * balance + config.moe_z_loss_coeff * z
