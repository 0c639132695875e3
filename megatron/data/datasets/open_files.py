"""How many files this process may hold open: a blend of hundreds of sources needs more than the usual default."""

from __future__ import annotations

import contextlib
import resource

from megatron import log
from megatron.config import DataConfig
from megatron.config.flags.blends import read_blend

_OTHER_FILES = 256  # libraries, connections, checkpoints
_TOKEN_FILES = 2  # tokens and index of a source
_INDEX_ARRAYS = 3  # of a source in a group; a map holds its file open


def uses_of(data: DataConfig) -> int:
    """The sources of every group added up; the sources of --data-path are in each of the three splits."""
    groups = (*data.train_groups, *data.valid_groups, *data.test_groups)
    return 3 * len(read_blend(data.data_path, "--data-path")) + sum(len(group.entries) for group in groups)


def allow_open_files(sources: int, uses: int) -> None:
    """Raises this process's limit of open files as far as the system allows; warns if that may be too few.

    Args:
        sources: different prefixes.
        uses: sources summed over all groups that are trained on, validated or tested with.
    """
    needed = _TOKEN_FILES * sources + _INDEX_ARRAYS * uses + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    if soft != hard:
        for wanted in (hard, needed):  # some systems take no infinite limit, though they report one
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                break
    if hard != resource.RLIM_INFINITY and hard < needed:
        log.warning(
            f"the data may take {needed} open files and this system allows {hard}: if it says that too many files are "
            "open, raise the limit (ulimit -Hn) or merge some sources with tools/merge_preprocessed_data.py."
        )
