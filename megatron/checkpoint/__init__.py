"""Layout-free, pickle-free checkpoints: any layout writes, any layout reads.

Knows pieces of tensors and files; nothing of DeepSpeed and nothing of the training loop.
"""

from megatron.checkpoint.lock import CheckpointLock
from megatron.checkpoint.manifest import DamagedError
from megatron.checkpoint.recovery import Candidate, find, load_newest, newest_record
from megatron.checkpoint.save_load import load, read_record, read_tensors, save, verify

__all__ = [
    "Candidate",
    "CheckpointLock",
    "DamagedError",
    "find",
    "load",
    "load_newest",
    "newest_record",
    "read_record",
    "read_tensors",
    "save",
    "verify",
]
