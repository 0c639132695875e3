"""The styles by the names of --log-style."""

from __future__ import annotations

import types
from collections.abc import Mapping

from megatron.config import NO_PROGRAM, Program
from megatron.observe.console import LineStyle
from megatron.observe.styles import megatron, short

_STYLES: Mapping[str, LineStyle] = types.MappingProxyType(
    {
        "megatron": megatron,
        "short": short,
    }
)


def style_named(name: str, program: Program = NO_PROGRAM) -> LineStyle:
    """The style for a value of --log-style, built-in or defined by the program."""
    if name in program.log_styles:
        style: LineStyle = program.log_styles[name]()
        return style
    return _STYLES[name]
