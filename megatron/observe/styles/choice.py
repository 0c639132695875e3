"""The styles by the names of --log-style."""

from __future__ import annotations

import types
from collections.abc import Mapping

from megatron.observe.line_style import LineStyle
from megatron.observe.styles import all_in_one, dsgpt2, hello_deepspeed, jax_lm, megatron

_STYLES: Mapping[str, LineStyle] = types.MappingProxyType(
    {
        "megatron": megatron,
        "jax_lm": jax_lm,
        "dsgpt2": dsgpt2,
        "all_in_one": all_in_one,
        "hello_deepspeed": hello_deepspeed,
    }
)


def style_named(name: str) -> LineStyle:
    """The style of a value of --log-style."""
    return _STYLES[name]
