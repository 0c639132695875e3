"""Which guards contradict each other."""

from __future__ import annotations

import pytest

from megatron.config.sections.safety import SafetyConfig
from megatron.errors import ConfigError


def test_skipping_spikes_needs_steps_that_may_be_skipped() -> None:
    with pytest.raises(ConfigError, match=r"--skip-spikes 6 skips steps, and with --max-bad-steps 0 the first .* ends"):
        SafetyConfig(skip_spikes=6.0)
    assert SafetyConfig(skip_spikes=6.0, max_bad_steps=1).skip_spikes == 6.0
