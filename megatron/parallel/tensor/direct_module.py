"""Modules with fast access to parameters and submodules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class DirectModule(nn.Module):
    """A module that also keeps its parameters and submodules in the instance's `__dict__`.

    `nn.Module.__getattr__` searches its own dictionaries only after the instance and its classes: ten times as slow,
    and a block has about twenty such accesses. ZeRO-3 replaces the dictionary of parameters by one that gathers a
    parameter when it is read; from then on parameters are read there.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_modules", ()):
            self.__dict__[name] = value
        elif name == "_parameters":
            for parameter in value:
                self.__dict__.pop(parameter, None)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._keep_parameters()

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)  # may make new parameters
        self._keep_parameters()
        return self

    def _keep_parameters(self) -> None:
        if type(self._parameters) is dict:
            self.__dict__.update(self._parameters)
