"""Invalid combinations of the launcher's flags."""

from __future__ import annotations

import pytest

from megatron.config import parse_flags
from megatron.errors import ConfigError
from trident.launch.launching import LaunchRequest


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--local --slurm", "--local and --slurm cannot be combined: each sets where the ranks run"),
        ("--slurm --ssh x", "--slurm and --ssh cannot be combined"),
        ("--ssh x --hosts a", "--ssh and --hosts cannot be combined"),
        ("--local --hosts a", "--local and --hosts cannot be combined"),
        ("--nodes 2 --node-rank 2", r"--node-rank 2 is not among 2 nodes \(--nodes\). The first is 0 and the last 1"),
        ("--node-rank 1", "--node-rank 1 is not among 1 nodes"),
        ("--nodes 0", "--nodes"),
    ],
)
def test_refusals(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_flags(LaunchRequest, flags.split())
