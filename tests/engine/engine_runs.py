"""Short runs of the engine, for tests that compare ranks or states."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

from megatron.engine.engine import Engine
from tests.parity.layouts import local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=2, steps=2, hidden_size=16)
BF16 = ["--bf16"]
# Two chunks of the network a stage, and backward passes in two halves.
CHUNKS = ["--pipeline-schedule", "interleaved-zb", "--num-layers", "4"]


def train(engine: Engine, config: Any, first: int, last: int, recipe: Recipe = RECIPE) -> None:
    """Trains the steps [first, last) of the recipe."""
    for step in range(first, last):
        engine.train_batch(local_batches(recipe, config, engine.mesh, step, True), recipe.learning_rate)


def step_figures(loss: float, norm: float | torch.Tensor, tokens: float = 4.0) -> torch.Tensor:
    """What a gate judges a step by, from its mean loss."""
    return torch.tensor([float(norm), loss * tokens if tokens else loss, tokens], dtype=torch.float64)


def stand_in_engine(optimizer: torch.optim.Optimizer, wrapper: Any = None, *, is_fp16: bool = False) -> SimpleNamespace:
    """What the view of a network without ZeRO asks of DeepSpeed's engine."""
    return SimpleNamespace(
        optimizer=optimizer if wrapper is None else wrapper,
        basic_optimizer=optimizer,
        communication_data_type=torch.float16 if is_fp16 else torch.float32,
        fp16_enabled=lambda: is_fp16,
        postscale_gradients=lambda: True,
        gradient_predivide_factor=lambda: 1.0,
        set_gradient_accumulation_boundary=lambda is_boundary: None,
    )
