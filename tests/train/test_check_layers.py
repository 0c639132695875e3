"""The stages together must hold all layers that were asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.engine.engine import Engine
from megatron.errors import LaunchError
from megatron.parallel.mesh import ParallelMesh
from megatron.train.build import check_layers


def engine_with(blocks: int, num_layers: int) -> Engine:
    """What `check_layers` looks at, with so many blocks built."""
    names = [f"decoder.layers.{index}.mlp.linear_fc1.{part}" for index in range(blocks) for part in ("weight", "bias")]
    parameters = [("embedding.word_embeddings.weight", 8), *((name, 4) for name in names)]
    fake: Any = SimpleNamespace(
        mesh=ParallelMesh.single(), model=SimpleNamespace(num_layers=num_layers), counted_parameters=lambda: parameters
    )
    return cast(Engine, fake)


def test_all_layers_are_there() -> None:
    check_layers(engine_with(12, 12))


def test_a_missing_layer_is_an_error() -> None:
    with pytest.raises(LaunchError, match="hold 28 transformer layers together, not the 30"):
        check_layers(engine_with(28, 30))
