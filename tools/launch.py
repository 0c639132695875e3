"""Launches a run on this machine, on hosts by ssh, or on the nodes of a Slurm job, after checking its layout.

    python tools/launch.py --devices-per-node 4 -- pretrain_gpt.py FLAGS
    python tools/launch.py --ssh hosts.txt --devices-per-node 8 -- pretrain_gpt.py FLAGS
    python tools/launch.py --slurm --devices-per-node 8 -- pretrain_gpt.py FLAGS            (in a batch script)
    python tools/launch.py --hosts 'node[003-007,011]' --devices-per-node 8 --dry-run -- pretrain_gpt.py FLAGS

Invalid flags and layouts are reported before anything starts. --dry-run prints the command of each node. If a rank or a
host fails, the others are terminated. Ctrl-C lets the ranks save; a second one kills them. The exit code is that of the
run: 75 if it can be restarted, 77 for bad numerics; see docs/launching.md.
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
    """Checks the command, then prints or runs it; returns the exit code of the run."""
    from trident.launch.launching import LaunchRequest, launch

    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--" not in arguments and any(text.endswith(".py") for text in arguments):
        raise ConfigError("the program must follow --: tools/launch.py FLAGS -- pretrain_gpt.py ITS FLAGS")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    request = parse_flags(LaunchRequest, arguments[:end], prog="launch.py", description=__doc__ or "")
    return launch(request, arguments[end + 1 :], str(Path(__file__).resolve()))


if __name__ == "__main__":
    process_exit.exit_with(main)
