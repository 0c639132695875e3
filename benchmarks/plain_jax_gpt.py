"""The network and the optimizer of `torch_beside_jax.py` in plain JAX: one compiled function a step, nothing else."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Weights = dict[str, jax.Array]


@dataclass(frozen=True)
class Settings:
    """The constants of a compiled step."""

    layers: int
    heads: int
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float


class JaxLoop:
    """Trains by AdamW with global clipping; matrices decay, biases and norms do not.

    Args:
        weights: initial values by Megatron's names.
    """

    def __init__(self, weights: Mapping[str, np.ndarray], settings: Settings) -> None:
        self.weights: Weights = {name: jnp.asarray(value) for name, value in weights.items()}
        self.moments = tuple({name: jnp.zeros_like(value) for name, value in self.weights.items()} for _ in range(2))
        self.steps = 0
        self._step = jax.jit(functools.partial(_step, settings), donate_argnums=(0, 1))

    def step(self, tokens: np.ndarray, labels: np.ndarray, learning_rate: float) -> float:
        """One update; returns the loss before it. Shapes: tokens and labels int64 [b, s]."""
        self.steps += 1
        batch = jnp.asarray(tokens, jnp.int32), jnp.asarray(labels, jnp.int32)
        self.weights, self.moments, loss = self._step(self.weights, self.moments, *batch, learning_rate, self.steps)
        return float(loss)


def _step(
    settings: Settings, weights: Weights, moments: Any, tokens: jax.Array, labels: jax.Array, rate: Any, number: Any
) -> tuple[Weights, Any, jax.Array]:
    loss, gradient = jax.value_and_grad(functools.partial(_loss, settings))(weights, tokens, labels)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(value)) for value in gradient.values()))
    factor = jnp.minimum(1.0, settings.clip / (norm + 1e-6)) if settings.clip else 1.0
    first, second, updated = {}, {}, {}
    for name, weight in weights.items():
        slope = gradient[name] * factor
        first[name] = settings.beta1 * moments[0][name] + (1 - settings.beta1) * slope
        second[name] = settings.beta2 * moments[1][name] + (1 - settings.beta2) * jnp.square(slope)
        mean = first[name] / (1 - settings.beta1**number)
        deviation = jnp.sqrt(second[name] / (1 - settings.beta2**number))
        decay = settings.weight_decay if weight.ndim > 1 else 0.0
        updated[name] = weight * (1 - rate * decay) - rate * mean / (deviation + settings.eps)
    return updated, (first, second), loss


def _loss(settings: Settings, weights: Weights, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all tokens, in nats."""
    log_probabilities = jax.nn.log_softmax(_logits(settings, weights, tokens))  # [b, s, v]
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1))


def _logits(settings: Settings, weights: Weights, tokens: jax.Array) -> jax.Array:
    words = weights["embedding.word_embeddings.weight"]
    x = words[tokens] + weights["embedding.position_embeddings.weight"][: tokens.shape[1]]  # [b, s, h]
    for layer in range(settings.layers):
        block = functools.partial(_linear, weights, f"decoder.layers.{layer}")
        name = f"decoder.layers.{layer}"
        qkv = block("self_attention.linear_qkv", _norm(weights, f"{name}.input_layernorm", x))
        x = x + block("self_attention.linear_proj", _attend(qkv, settings.heads))
        inner = block("mlp.linear_fc1", _norm(weights, f"{name}.pre_mlp_layernorm", x))
        x = x + block("mlp.linear_fc2", jax.nn.gelu(inner, approximate=True))
    return _norm(weights, "decoder.final_layernorm", x) @ words.T


def _attend(qkv: jax.Array, heads: int) -> jax.Array:
    """Causal attention. Shapes: `[b, s, 3h]`, the query, key and value of a head side by side, to `[b, s, h]`."""
    batch, length, width = qkv.shape
    query, key, value = jnp.moveaxis(qkv.reshape(batch, length, heads, 3, width // 3 // heads), 3, 0)  # [b, s, a, d]
    scores = jnp.einsum("bqad,bkad->baqk", query, key) / np.sqrt(query.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    context = jnp.einsum("baqk,bkad->bqad", jax.nn.softmax(scores), value)
    return context.reshape(batch, length, width // 3)


def _linear(weights: Weights, layer: str, name: str, x: jax.Array) -> jax.Array:
    return x @ weights[f"{layer}.{name}.weight"].T + weights[f"{layer}.{name}.bias"]


def _norm(weights: Weights, name: str, x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return centred / jnp.sqrt(variance + 1e-5) * weights[f"{name}.weight"] + weights[f"{name}.bias"]
