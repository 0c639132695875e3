"""Parameters and parts of a module lie where attributes are found first, and are those of torch's dictionaries."""

from __future__ import annotations

import copy
from collections import OrderedDict

import torch
from torch import nn

from megatron.parallel.tensor.direct_module import DirectModule


class Pair(DirectModule):
    def __init__(self) -> None:
        self.size = 3
        super().__init__()
        self.weight = nn.Parameter(torch.ones(self.size))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)
        self.part: nn.Module | None = nn.Linear(2, 2)


def direct(module: nn.Module) -> dict[str, object]:
    """What lies in the instance."""
    return {name: module.__dict__[name] for name in ("weight", "bias", "part") if name in module.__dict__}


def registered(module: nn.Module) -> dict[str, object]:
    return {**module._parameters, **module._modules}


def test_each_is_found_without_a_search() -> None:
    module = Pair()
    assert direct(module) == registered(module) and module.bias is None
    assert [name for name, _ in module.named_parameters()] == ["weight", "part.weight", "part.bias"]


def test_replaced_and_moved_ones_are_found() -> None:
    module = Pair()
    module.weight, module.bias = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    module.part = None
    assert len(module.weight) == 2 and module.part is None and direct(module) == registered(module)
    module.to("meta")  # for which torch makes new parameters
    assert module.weight.is_meta and direct(module) == registered(module)
    other = copy.deepcopy(module)
    assert other.weight is not module.weight and direct(other) == registered(other)


def test_another_dictionary_of_parameters_is_read() -> None:
    read = []

    class Gathering(OrderedDict[str, nn.Parameter | None]):
        def __getitem__(self, name: str) -> nn.Parameter | None:
            read.append(name)
            return super().__getitem__(name)

    module = Pair()
    module._parameters = Gathering(module._parameters)  # type: ignore[assignment]
    read.clear()
    assert len(module.weight) == 3 and read == ["weight"] and set(direct(module)) == {"part"}
    module.weight = nn.Parameter(torch.zeros(2))
    assert len(module.weight) == 2 and set(direct(module)) == {"part"}
