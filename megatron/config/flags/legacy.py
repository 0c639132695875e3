"""Flags of published launch scripts that set no field here: accepted and ignored, or refused with what to use instead.

The flags are in `legacy_flags.txt`, which says how it is read.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.flags.fields import Flag, FlagFacts
from megatron.files.plain import read_plain_text

SUPPORTED = "supported"
IGNORED = "ignored"
REFUSED = "refused"
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


def legacy_flags() -> dict[str, Legacy]:
    """Every flag that is known but sets no field, by its destination `legacy.name`."""
    return dict(_read_table())


@functools.cache
def _read_table() -> Mapping[str, Legacy]:
    """The rows of the table: a line with a status and a reason, and below it the flags that it holds for."""
    table, status, reason = dict[str, Legacy](), "", ""
    for line in read_plain_text(TABLE).splitlines():
        if line.startswith("  "):
            entry = _entry(line.split(), status, reason)
            table[f"legacy.{entry.flag.field}"] = entry
        elif not line.startswith("#"):
            status, _, reason = line.partition(": ")
    return types.MappingProxyType(table)


def _entry(words: Sequence[str], status: str, reason: str) -> Legacy:
    (name, *spelled), type_name = words[0].split(","), words[1] if words[1:] else "bool"
    element = _TYPES[type_name.removesuffix("...")]
    harmless = element(words[2]) if words[2:] else None
    facts = FlagFacts(help=reason, spelled=tuple(spelled), numeric=True)
    default, is_tuple = False if element is bool else harmless, type_name.endswith("...")
    field = name.removeprefix("--").replace("-", "_")
    return Legacy(
        Flag(field, element, facts, default, required=False, is_tuple=is_tuple, count=None), status, reason, harmless
    )
