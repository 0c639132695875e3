"""The engine: every text of a mixed batch is the text that the request gets alone, for every architecture."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron.errors import ConfigError, NumericsError
from megatron.inference.generation import GenerationEngine, Request, generate_all
from megatron.inference.generation.completion import recompute
from megatron.inference.sampling import Sampling
from tests.helpers.architectures import ARCHITECTURES
from tests.inference.networks import GREEDY, load, mixed_requests, texts

FACTORS = {"rope_short_factors": (1.0,) * 3, "rope_long_factors": (3.0,) * 3, "rope_original_max_positions": 8}
ROPE = {"position_embedding_type": "rope", "rope_original_max_positions": 8}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {**ROPE, "rope_scaling_type": "linear", "rope_scaling_factor": 2.0},
    "llama3": {**ROPE, "rope_scaling_type": "llama3"},
    "yarn": {**ROPE, "rope_scaling_type": "yarn"},
    "longrope": {**ROPE, "rope_scaling_type": "longrope", **FACTORS},
    "dynamic": {**ROPE, "rope_scaling_type": "dynamic", "rope_scaling_factor": 2.0},
}
EACH = pytest.mark.parametrize(
    "changes", [*ARCHITECTURES.values(), *SCALINGS.values()], ids=[*ARCHITECTURES, *SCALINGS]
)


def steps(engine: GenerationEngine, count: int = 10_000) -> dict[str, list[int | None]]:
    """The tokens of every request after some steps."""
    found: dict[str, list[int | None]] = {}
    while count and not engine.is_idle:
        for generated in engine.step():
            found.setdefault(generated.request_id, []).append(generated.token)
        count -= 1
    return found


@EACH
def test_a_text_does_not_depend_on_the_batch(changes: dict[str, Any]) -> None:
    loaded = load(changes)
    requests = mixed_requests(7)
    mixed = generate_all(loaded, requests)
    alone = [generate_all(loaded, [request])[0] for request in requests]
    crowded = generate_all(loaded, requests, max_sequences=3)
    assert texts(mixed) == texts(alone) == texts(crowded)
    for one, other in zip(mixed, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    if changes.get("rope_scaling_type") != "dynamic":  # its keys keep the frequencies of the length they came at
        assert texts(mixed) == texts([recompute(loaded, request) for request in requests])
    assert len(set(texts(mixed))) == 7
