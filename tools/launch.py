"""Starts a run on this machine, on hosts that ssh reaches, or on the nodes of a Slurm job; checks its layout first.

    python tools/launch.py --devices-per-node 4 -- pretrain_gpt.py FLAGS
    python tools/launch.py --ssh hosts.txt --devices-per-node 8 -- pretrain_gpt.py FLAGS
    python tools/launch.py --slurm --devices-per-node 8 -- pretrain_gpt.py FLAGS            (in a batch script)
    python tools/launch.py --hosts 'node[003-007,011]' --devices-per-node 8 --dry-run -- pretrain_gpt.py FLAGS

Problems with the flags or the layout are reported before anything starts. --dry-run prints the command of each node. If
a rank or a host fails, the others are ended. Ctrl-C lets the ranks save; a second one kills them. The exit code is that
of the run: 75 means that it can be started again, 77 bad numerics; see docs/launching.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import process_exit
from megatron.config import parse_flags
from megatron.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Checks, then prints or runs; returns the exit code of the run."""
    from trident.launch.launching import LaunchRequest, launch

    words = list(sys.argv[1:] if argv is None else argv)
    if "--" not in words and any(word.endswith(".py") for word in words):
        raise ConfigError("the program must follow --: tools/launch.py FLAGS -- pretrain_gpt.py ITS FLAGS")
    end = words.index("--") if "--" in words else len(words)
    request = parse_flags(LaunchRequest, words[:end], prog="launch.py", description=__doc__ or "")
    return launch(request, words[end + 1 :], str(Path(__file__).resolve()))


if __name__ == "__main__":
    process_exit.exit_with(main)
