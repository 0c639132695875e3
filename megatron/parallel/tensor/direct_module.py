"""Modules whose parameters and parts are found as fast as any other attribute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class DirectModule(nn.Module):
    """A module that also keeps its parameters and parts where Python looks for attributes first.

    `nn.Module` keeps them in dictionaries of its own, which `nn.Module.__getattr__` searches once the instance and its
    classes were searched in vain: ten times as long, in a block about twenty times.

    ZeRO-3 replaces the dictionary of parameters by one that gathers a parameter when it is read, so from then on
    parameters are read there.
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
