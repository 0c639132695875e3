"""What can be asked of the launcher, and what excludes what."""

from __future__ import annotations

import pytest

from megatron.config import parse_flags
from megatron.errors import ConfigError
from trident.launch.launching import LaunchRequest


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--local --slurm", "--local and --slurm exclude each other"),
        ("--slurm --ssh x", "--slurm and --ssh exclude each other"),
        ("--ssh x --hosts a", "--hosts and --ssh both say where the ranks run"),
        ("--local --hosts a", "--hosts and --local both say where the ranks run"),
        ("--nodes 2 --node-rank 2", r"--node-rank 2 is not among 2 nodes \(--nodes\). The first is 0 and the last 1"),
        ("--node-rank 1", "--node-rank 1 is not among 1 nodes"),
        ("--nodes 0", "--nodes"),
    ],
)
def test_refusals(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_flags(LaunchRequest, flags.split())
