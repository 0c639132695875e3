"""Flags of published launch scripts that set no field here: accepted and ignored, or refused with what to use instead.

The flags are in `legacy_flags.txt`, which says how it is read.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.flags.fields import Flag, FlagFacts
from megatron.config.flags.status_table import IGNORED, StatusRow, read_status_table

IGNORING = "is accepted and ignored"
TABLE = Path(__file__).with_name("legacy_flags.txt")
_TYPES: Mapping[str, type] = types.MappingProxyType({"bool": bool, "int": int, "float": float, "str": str})


@dataclass(frozen=True)
class Legacy:
    """A flag that is known but sets no field.

    Attributes:
        harmless: the value that asks for what is done anyway, for which no message is shown; None if there is none.
    """

    flag: Flag
    status: str
    reason: str
    harmless: Any

    def sentence(self, option: str, value: Any) -> str | None:
        """The message for a user who gave it; None if the value asks for the default behavior."""
        words = value if self.flag.is_tuple else (value,)
        if value is False or (self.harmless is not None and words == (self.harmless,)):
            return None
        shown = option if value is True else f"{option} {' '.join(str(word) for word in words)}".rstrip()
        verb = IGNORING if self.status == IGNORED else "is refused"
        return f"{shown} {verb}: {self.reason}"


# Spellings of supported flags that upstream has dropped.
DEPRECATED: Mapping[str, str] = types.MappingProxyType(
    {
        "--deepscale": "it is an old name for --deepspeed.",
        "--deepscale_config": "it is an old name for --deepspeed_config.",
        "--deepscale-config": "it is an old name for --deepspeed_config.",
    }
)


@functools.cache
def legacy_flags() -> Mapping[str, Legacy]:
    """Reads the table; every flag that is known but sets no field, by its destination `legacy.name`."""
    entries = map(_entry, read_status_table(TABLE))
    return types.MappingProxyType({f"legacy.{entry.flag.field}": entry for entry in entries})


def _entry(row: StatusRow) -> Legacy:
    (name, *spelled), type_name = row.name.split(","), row.words[0] if row.words else "bool"
    element = _TYPES[type_name.removesuffix("...")]
    harmless = element(row.words[1]) if row.words[1:] else None
    facts = FlagFacts(help=row.reason, spelled=tuple(spelled), numeric=True)
    default, is_tuple = False if element is bool else harmless, type_name.endswith("...")
    field = name.removeprefix("--").replace("-", "_")
    flag = Flag(field, element, facts, default, required=False, is_tuple=is_tuple, count=None)
    return Legacy(flag, row.status, row.reason, harmless)
