"""The seed."""

from __future__ import annotations

import pytest

from megatron.config import RandomConfig
from megatron.errors import ConfigError


def test_the_seed_is_upstreams_unless_given() -> None:
    assert RandomConfig().seed == 1234


def test_a_seed_is_positive() -> None:
    with pytest.raises(ConfigError, match=r"--seed 0 is out of range\. It must be at least 1\."):
        RandomConfig(seed=0)
