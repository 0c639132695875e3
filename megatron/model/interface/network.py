"""A network as a list of layers, and the module that runs the layers of one rank.

The list describes every layer without building it; each rank builds those that it owns. One process, a pipeline stage
and a generating program all run the same `LayerStack`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.model.interface.key_value_cache import KeyValueCache
from megatron.model.interface.step_context import StepContext
from megatron.parallel.rng import normal_
from megatron.parallel.shard_spec import shard_spec_of


class LayerKind(Enum):
    """What a layer is in the network; pipeline stages are cut between blocks."""

    EMBEDDING = "embedding"
    BLOCK = "block"
    NORM = "norm"
    HEAD = "head"


@dataclass(frozen=True)
class LayerCost:
    """What a layer costs over all ranks that share it.

    Attributes:
        parameters: elements of its weights.
        flops_per_token: forward floating-point operations of one token, without attention scores.
        flops_per_token_pair: forward floating-point operations of one query with one key.
    """

    parameters: int
    flops_per_token: int = 0
    flops_per_token_pair: int = 0


@dataclass(frozen=True)
class LayerSpec:
    """A layer that is built only by the rank that owns it.

    Args:
        name: global name; a parameter's is this, a dot, and its name inside the module.
        kind: what it is in the network.
        cost: what it costs.
        build: makes the module, its matrices still zero. It maps hidden states (the first layer: the micro-batch's
            inputs) and a `StepContext` to hidden states (the last one: outputs).
        tied_to: the layer whose weight this one shares; `build` then takes that weight as `weight` where both are on
            one rank, and makes a copy where they are not.
    """

    name: str
    kind: LayerKind
    cost: LayerCost
    build: Callable[..., nn.Module]
    tied_to: str | None = None


class LayerStack(nn.Module):
    """Some consecutive layers of a network as one module; `named_parameters` gives the global names.

    Args:
        specs: the layers in order.
        seed: initial values are drawn with it; None leaves the matrices zero, for weights that are loaded afterwards.
        build: makes a layer from its description and the weight it shares, for callers that must do more than build it.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        seed: int | None = None,
        build: Callable[[LayerSpec, nn.Parameter | None], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self._layers: list[tuple[LayerSpec, nn.Module]] = []
        built: dict[str, nn.Module] = {}
        for spec in specs:
            shared = built.get(spec.tied_to) if spec.tied_to is not None else None
            weight = None if shared is None else _shared_weight(shared, str(spec.tied_to))
            module = (build or build_layer)(spec, weight)
            if shared is None:
                name_parameters(spec, module)
                if seed is not None:
                    draw_initial_values(module, seed)
            built[spec.name] = module
            self._layers.append((spec, module))
            _attach(self, spec.name, module)

    def forward(self, inputs: Any, context: StepContext) -> torch.Tensor:
        """Runs the layers.

        Args:
            inputs: hidden states; for a stack with the first layer, the micro-batch's inputs.
        """
        for _, layer in self._layers:
            inputs = layer(inputs, context)
        return inputs  # type: ignore[no-any-return]

    def named_layers(self) -> Iterator[tuple[LayerSpec, nn.Module]]:
        """The layers with their descriptions, in order."""
        yield from self._layers

    def layer(self, name: str) -> nn.Module:
        """A layer by its global name.

        Raises:
            ConfigError: it is not in this stack.
        """
        for spec, module in self._layers:
            if spec.name == name:
                return module
        raise ConfigError(f"layer {name} is not among the {len(self._layers)} layers of this stage.")

    def weight_of(self, name: str) -> nn.Parameter:
        """The weight that a layer shares with others.

        Raises:
            ConfigError: the layer is not in this stack, or has no weight.
        """
        return _shared_weight(self.layer(name), name)

    def new_caches(self, capacity: int) -> list[KeyValueCache]:
        """Empty caches, one per block, for generating sequences of up to `capacity` tokens."""
        return [KeyValueCache(capacity) for spec, _ in self._layers if spec.kind is LayerKind.BLOCK]


def build_layer(spec: LayerSpec, shared: nn.Parameter | None = None) -> nn.Module:
    """Builds a layer, with the weight it shares if there is one on this rank."""
    return spec.build() if shared is None else spec.build(weight=shared)


def name_parameters(spec: LayerSpec, module: nn.Module) -> None:
    """Gives every parameter its global name (`parameter.global_name`), a tied copy that of the original."""
    for inner, parameter in module.named_parameters():
        parameter.global_name = f"{spec.tied_to or spec.name}.{inner}"  # type: ignore[attr-defined]
        if spec.tied_to is not None:
            parameter.shard_spec = shard_spec_of(parameter).as_tied_copy()  # type: ignore[attr-defined]


def draw_initial_values(module: nn.Module, seed: int) -> None:
    """Draws the matrices of a named module; norms and biases stay as they were built."""
    for parameter in module.parameters():
        spec = shard_spec_of(parameter)
        if spec.is_matrix:
            normal_(parameter.detach().view(-1), spec, seed, parameter.global_name)  # type: ignore[attr-defined]


def _shared_weight(module: nn.Module, name: str) -> nn.Parameter:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter):
        raise ConfigError(f"layer {name} is a {type(module).__name__}, which has no weight for other layers to share.")
    return weight


def _attach(root: nn.Module, dotted_name: str, module: nn.Module) -> None:
    """Puts a module at a dotted name, making plain containers on the way."""
    *path, last = dotted_name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(last, module)
