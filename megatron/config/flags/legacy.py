"""Flags of published launch scripts without a field here: ignored with a warning, or refused with an alternative.

The table is `legacy_flags.txt`, whose header describes its format.
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
    """A known flag without a field.

    Attributes:
        harmless: the value that matches the behavior here and needs no message; None if there is none.
    """

    flag: Flag
    status: str
    reason: str
    harmless: Any

    def sentence(self, option: str, value: Any) -> str | None:
        """The message for a given value; None if it matches the behavior here."""
        values = value if self.flag.is_tuple else (value,)
        if value is False or (self.harmless is not None and values == (self.harmless,)):
            return None
        shown = option if value is True else f"{option} {' '.join(map(str, values))}".rstrip()
        verb = IGNORING if self.status == IGNORED else "is refused"
        return f"{shown} {verb}: {self.reason}"


# Spellings of supported flags that upstream has removed.
DEPRECATED: Mapping[str, str] = types.MappingProxyType(
    {
        "--deepscale": "it is an old name of --deepspeed.",
        "--deepscale_config": "it is an old name of --deepspeed_config.",
        "--deepscale-config": "it is an old name of --deepspeed_config.",
    }
)


@functools.cache
def legacy_flags() -> Mapping[str, Legacy]:
    """Reads the table of flags without a field, by destination `legacy.name`."""
    entries = map(_entry, read_status_table(TABLE))
    return types.MappingProxyType({f"legacy.{entry.flag.field}": entry for entry in entries})


def _entry(row: StatusRow) -> Legacy:
    (name, *spelled), type_name = row.name.split(","), row.arguments[0] if row.arguments else "bool"
    element = _TYPES[type_name.removesuffix("...")]
    harmless = element(row.arguments[1]) if row.arguments[1:] else None
    facts = FlagFacts(help=row.reason, spelled=tuple(spelled), numeric=True)
    default, is_tuple = False if element is bool else harmless, type_name.endswith("...")
    field = name.removeprefix("--").replace("-", "_")
    flag = Flag(field, element, facts, default, required=False, is_tuple=is_tuple, count=None)
    return Legacy(flag, row.status, row.reason, harmless)
