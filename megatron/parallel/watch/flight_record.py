"""The last messages of this process, from torch's flight recorder: the communication a rank hangs in.

Reads NCCL's recorder if torch was built with NCCL, the generic one otherwise. Empty if torch has neither or the user
has disabled recording (`TORCH_FR_BUFFER_SIZE=0`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch._C import _distributed_c10d

_SHOWN = 12
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def last_messages() -> str:
    """Returns a line for each of the last messages, oldest first; empty without a record."""
    for name in _RECORDERS:
        dump = getattr(_distributed_c10d, name, None)
        try:
            entries = [] if dump is None else json.loads(dump()).get("entries", [])
        except (RuntimeError, ValueError):
            continue
        if entries:
            return "\n".join(_line(entry) for entry in entries[-_SHOWN:])
    return ""


def _line(entry: Mapping[str, Any]) -> str:
    group = " ".join(map(str, entry.get("process_group", ())))
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id")
    sizes, kinds = entry.get("input_sizes"), ",".join(map(str, entry.get("input_dtypes", ())))
    return f"  {entry.get('profiling_name')} {number} of group {group}: {sizes} {kinds}, {entry.get('state')}"
