"""Upstream's notation for a choice that varies over the layers: a number, or a list such as `([0]*1+[1]*3)*2`."""

from __future__ import annotations

import ast

from megatron.errors import ConfigError

_MOST_ENTRIES = 10_000


def read_pattern(option: str, text: str, num_layers: int | None) -> int | tuple[int, ...]:
    """The number, or the entries of a list of zeros and ones that may be written with `+`, `*` and parentheses.

    Args:
        option: the flag, for the message.
        text: what was given. It is read as a syntax tree and never executed.
        num_layers: entries that a list must have, if known.

    Raises:
        ConfigError: it is neither, or has another number of entries.

    Source: NVIDIA Megatron-LM `megatron/training/arguments.py`, `moe_freq_type`.
    """
    try:
        pattern = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pattern = None
    if isinstance(pattern, int) and 1 <= pattern <= _MOST_ENTRIES:
        return pattern
    if not isinstance(pattern, tuple) or not pattern or not set(pattern) <= {0, 1}:
        raise ConfigError(
            f"{option} {text} is not a choice of layers. Write a number from 1 to {_MOST_ENTRIES}, or a list of 0 and "
            "1 such as ([0]*1+[1]*3)*2."
        )
    if num_layers is not None and len(pattern) != num_layers:
        raise ConfigError(
            f"{option} {text} has {len(pattern)} entries, and --num-layers is {num_layers}. Give one entry a layer."
        )
    return pattern


def shortest_period(pattern: tuple[int, ...]) -> tuple[int, ...]:
    """The shortest pattern that gives the same layers when it is repeated; empty if it is 1 for all of them."""
    if set(pattern) == {1}:
        return ()
    for length in range(1, len(pattern)):
        if len(pattern) % length == 0 and pattern[:length] * (len(pattern) // length) == pattern:
            return pattern[:length]
    return pattern


def _value(node: ast.expr) -> int | tuple[int, ...]:
    """The value of numbers, lists, sums of lists and multiples of lists.

    Raises:
        ValueError: the expression is anything else, or too long.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return tuple(_number(_value(item)) for item in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _value(node.left), _value(node.right)
        if isinstance(left, tuple) and isinstance(right, tuple) and isinstance(node.op, ast.Add):
            return left + right
        if isinstance(left, tuple) and isinstance(right, int) and isinstance(node.op, ast.Mult):
            return _repeated(left, right)
    raise ValueError("not a pattern")


def _repeated(pattern: tuple[int, ...], times: int) -> tuple[int, ...]:
    if 0 <= len(pattern) * times <= _MOST_ENTRIES:
        return pattern * times
    raise ValueError("too long")


def _number(value: int | tuple[int, ...]) -> int:
    if isinstance(value, int):
        return value
    raise ValueError("a list within a list")
