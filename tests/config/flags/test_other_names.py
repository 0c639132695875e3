"""Names of other trainers lead to the flags that are meant."""

from __future__ import annotations

from megatron.config.flags import command_line
from megatron.config.flags.command_line import meant_flag
from megatron.config.parse import field_flags


def test_every_name_leads_to_a_flag_and_is_none_itself() -> None:
    known = {spelling for flag in field_flags().values() for spelling in flag.spellings}
    assert set(command_line._NAMES) <= known
    names = [f"--{name}" for names in command_line._NAMES.values() for name in names.split()]
    assert len(names) == len(set(names)), "each name leads to one flag"
    assert known.isdisjoint(names)


def test_a_tool_without_the_flag_gives_no_such_hint() -> None:
    assert meant_flag("--tp", ("--input",)) is None
    assert meant_flag("--zebra", ("--lr",)) is None
