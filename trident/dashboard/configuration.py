"""The configurations of runs as rows of a table, and their differences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.secret_text import masked

_LONGEST_VALUE = 2_000
# Paths and names differ between any two runs.
_PATHS = frozenset({"report.run_dir", "saving.save", "loading.load", "report.wandb_exp_name", "data.data_cache_path"})


def rows(config: Mapping[str, Any]) -> dict[str, str]:
    """The values as text by "section.field", with secrets masked."""
    table = {}
    for section, fields in config.items():
        if section == "provenance":
            continue
        for name, value in fields.items() if isinstance(fields, dict) else [("", fields)]:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            table[f"{section}.{name}".rstrip(".")] = masked(text)[:_LONGEST_VALUE]
    return table


def given(config: Mapping[str, Any]) -> list[str]:
    """The fields set by the user, as "section.field"."""
    origins = config.get("provenance")
    entries = origins.items() if isinstance(origins, dict) else []
    return sorted(name for name, origin in entries if origin not in ("default", "derived"))


def differences(tables: Sequence[Mapping[str, str]]) -> list[str]:
    """The rows that differ between tables; paths, which always differ, come last."""
    names = dict.fromkeys(name for table in tables for name in table)
    differing = [name for name in names if len({table.get(name) for table in tables}) > 1]
    return sorted(differing, key=_PATHS.__contains__)
