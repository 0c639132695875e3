"""Optimizer states as pieces: what each optimizer keeps."""

from __future__ import annotations

import dataclasses

from megatron.config.sections.optim import OptimRequest
from megatron.engine import state


def test_every_optimizer_says_what_it_keeps() -> None:
    (optimizer,) = (field for field in dataclasses.fields(OptimRequest) if field.name == "optimizer")
    assert state._MOMENTS.keys() == set(optimizer.metadata["flag"].choices)
