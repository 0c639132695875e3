"""What a process that may be a rank does first: before its flags are read and before its slow imports.

Imports neither torch nor anything that does.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from pathlib import Path

from megatron import log
from megatron.errors import LaunchError
from megatron.parallel.launcher_death import die_with_launcher
from megatron.parallel.launchers import Ranks, discover_ranks


def begin_rank() -> None:
    """Ties this process to its launcher and tells the log which rank it is.

    Errors that end it are also written where torchrun looks for them, so that torchrun's report ends with the error of
    the rank that failed first.

    Raises:
        PeerLostError: the launcher has ended already.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        log.on_failure(functools.partial(write_error_file, Path(error_file)), only_if_shown=True)
    # What is wrong with the launcher's variables is reported together with what is wrong with the flags.
    with contextlib.suppress(LaunchError):
        ranks = launched_ranks()
        log.set_rank(ranks.rank, ranks.world_size)
        if ranks.has_parent_launcher:
            die_with_launcher()


def launched_ranks(local_rank: int | None = None) -> Ranks:
    """This process's rank and the number of ranks, by the launcher's variables; needs no contact with the others.

    Args:
        local_rank: the value of `--local_rank`.

    Raises:
        LaunchError: the variables contradict each other.
    """
    return discover_ranks(os.environ, local_rank=local_rank, parent_process_id=os.getppid())


def write_error_file(path: Path, code: int, text: str) -> bool:
    """Writes an error in the form in which torchrun reads those of its ranks; False, since it is shown here too.

    Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py, `record_exception`.
    """
    report = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(report))
    return False
