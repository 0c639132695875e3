"""The only file that calls `torch.save`: the formats written here are pickles by definition.

It writes dictionaries of tensors, numbers and texts, and the arguments of a run as `argparse.Namespace`, which is what
the programs that read them expect. Nothing here, nor anywhere else in this process, reads a pickle.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.errors import StorageError
from megatron.files.replacing import write_new


def namespace(arguments: Mapping[str, Any]) -> argparse.Namespace:
    """Arguments in the form in which the other programs store theirs."""
    return argparse.Namespace(**arguments)


def write_object(path: Path, value: Any) -> None:
    """Pickles a value into a new file, in a folder that is made if it is missing, and waits until it is on the disk.

    Raises:
        StorageError: the file system refused.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new(path, lambda file: torch.save(value, file))
    except (OSError, RuntimeError) as failure:  # torch's writer turns a full disk into a RuntimeError
        reason = getattr(failure, "strerror", None) or str(failure).splitlines()[0]
        raise StorageError(f"cannot write {path}: {reason}. Free space there or name another folder.") from failure
