"""What a run reports and where."""

from __future__ import annotations

import pytest

from megatron.config import ReportConfig
from megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"log_level": "loud"}, "--log-level loud is unknown"),
        ({"log_interval": 0}, "--log-interval 0 is out of range"),
        ({"run_dir": "s3://bucket/run"}, "--run-dir s3://bucket/run is an address, but must be a folder"),
        ({"program_flags": "[1]"}, r"--program-flags \[1\] must be a JSON object"),
    ],
)
def test_invalid_values_are_rejected(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ReportConfig(**flags)
