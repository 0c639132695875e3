"""Records the order in which functions are called, such as products and the messages that overlap with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def recorded(events: list[str], *functions: tuple[Any, str]) -> Iterator[None]:
    """Appends the names of attributes of modules that are called in the block, in order."""

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            events.append(name)
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in functions:
            patch.setattr(module, name, recording(name, getattr(module, name)))
        yield
