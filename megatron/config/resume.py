"""What a resume does with each field: must match, may change, or taken from the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.run import RunConfig


def check_resume(saved: Mapping[str, Any], current: RunConfig) -> RunConfig:
    """Compares the configuration of a checkpoint with the current one and returns the one to go on with."""
    return current
