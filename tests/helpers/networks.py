"""Small networks for tests, and one line to run them."""

from __future__ import annotations

from typing import Any

import torch

from megatron.config import ModelConfig
from megatron.model.interface.key_value_cache import KeyValueCaches
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import StepSettings
from megatron.model.networks import network_layers
from megatron.objective.language_model import LanguageModelObjective
from megatron.parallel.mesh import Axis, ParallelMesh

SEED = 1234


def tiny_config(padded_vocab_size: int = 128, **changes: Any) -> ModelConfig:
    """A two-block network of width 32 with 101 words; dropout as by default unless changed."""
    settings: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16,
        "init_method_std": 0.1, "vocab_size": 101, "padded_vocab_size": padded_vocab_size, **changes,
    }  # fmt: skip
    return ModelConfig(**settings)


def build_gpt(config: ModelConfig, mesh: ParallelMesh | None = None) -> LayerStack:
    """The whole network (or its tensor-parallel part) with its initial values."""
    return LayerStack(network_layers(config, mesh or ParallelMesh.single()), seed=SEED)


def forward(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    ids: torch.Tensor,
    segments: torch.Tensor | None = None,
    *,
    settings: StepSettings | None = None,
    caches: KeyValueCaches | None = None,
) -> torch.Tensor:
    """Logits of a micro-batch. Shapes: tokens and segments `[b, s]`, ids `[b]`; result `[b, s, v/t]`."""
    context = (settings or StepSettings(seed=SEED)).context(ids, segments, caches=caches)
    return model(tokens, context)


def mean_loss(logits: torch.Tensor, labels: torch.Tensor, axis: Axis, vocab_size: int = 101) -> torch.Tensor:
    """Mean loss of all tokens. Shapes: logits `[b, s, v/t]`, labels `[b, s]`; result `[]`."""
    targets = {"labels": labels, "loss_mask": torch.ones(labels.shape)}
    return LanguageModelObjective(axis, vocab_size)(logits, targets).loss_sum / labels.numel()
