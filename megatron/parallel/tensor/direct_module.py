"""Modules whose forward pass finds its parameters and parts at once."""

from __future__ import annotations

from typing import Any

from torch import nn


class DirectModule(nn.Module):
    """A module that reads its parameters from `_parameters` and its parts from `_modules`.

    As attributes they are found by `nn.Module.__getattr__`, a function that is called when the instance and its classes
    were searched in vain: ten times as long, in a block about twenty times. Both dictionaries have what was assigned
    last, so a parameter or a part may be replaced as in any module.
    """

    _parameters: dict[str, Any]
    _modules: dict[str, Any]
