"""Short runs of the engine, for tests that compare ranks or states."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.engine.engine import Engine
from tests.parity.layouts import local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=2, steps=2, hidden_size=16)
BF16 = ["--bf16"]


def train(engine: Engine, config: Any, first: int, last: int) -> None:
    """Trains the steps [first, last) of the recipe."""
    for step in range(first, last):
        engine.train_batch(local_batches(RECIPE, config, engine.mesh, step, True), RECIPE.learning_rate)
