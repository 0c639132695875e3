"""How many files this process may hold open: a blend of hundreds of sources needs more than most systems begin with."""

from __future__ import annotations

import resource

from megatron import log

_OTHER_FILES = 256  # libraries, connections, checkpoints


def allow_open_files(count: int) -> None:
    """Raises this process's limit of open files, if need be, as far as the system allows."""
    needed = count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if allowed < needed:
        log.warning(
            f"the data may take {needed} open files and this system allows {hard}: if it says that too many files are "
            "open, raise the limit (ulimit -Hn) or merge some sources with tools/merge_preprocessed_data.py."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
