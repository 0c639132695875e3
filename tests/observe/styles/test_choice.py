"""Every name of --log-style is a style, and a program may bring one."""

from __future__ import annotations

from megatron.config import Program
from megatron.config.flags.program import LOG_STYLES
from megatron.observe.styles.choice import style_named


def test_every_choice_has_a_style() -> None:
    styles = [style_named(name) for name in LOG_STYLES]
    assert len({id(style) for style in styles}) == len(LOG_STYLES)
    assert all(callable(style.iteration_lines) and callable(style.evaluation_lines) for style in styles)


def test_a_program_brings_a_style() -> None:
    brought = style_named("short")
    assert style_named("mine", Program(log_styles={"mine": lambda: brought})) is brought
