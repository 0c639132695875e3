"""Layout-free, pickle-free checkpoints: written by any layout, read by any layout.

Deals with pieces of tensors and files; independent of DeepSpeed and of the training loop.
"""

from megatron.checkpoint.lock import CheckpointLock
from megatron.checkpoint.manifest import read_record
from megatron.checkpoint.reader import read_tensors, verify
from megatron.checkpoint.recovery import (
    Candidate,
    LoadedCheckpoint,
    find,
    folder_of_step,
    load,
    load_newest,
    newest_record,
)
from megatron.checkpoint.saving import SaveOptions, save, write_snapshot
from megatron.checkpoint.snapshot import Snapshot, take_snapshot
from megatron.errors import DamagedError

__all__ = [
    "Candidate",
    "CheckpointLock",
    "DamagedError",
    "LoadedCheckpoint",
    "SaveOptions",
    "Snapshot",
    "find",
    "folder_of_step",
    "load",
    "load_newest",
    "newest_record",
    "read_record",
    "read_tensors",
    "save",
    "take_snapshot",
    "verify",
    "write_snapshot",
]
