"""A network as a list of layers, and the module that runs the layers of one rank.

The list describes every layer without building it; each rank builds the layers it owns. A single process, a pipeline
stage and the generation tool all run the same `LayerStack`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.kernels import products
from megatron.kernels.choice import Implementation
from megatron.model.interface.key_value_cache import BatchCaches
from megatron.model.interface.layer_cost import LayerCost
from megatron.model.interface.step_context import StepContext
from megatron.model.interface.step_state import named_states, states_of
from megatron.parallel.rng import draw_weights_
from megatron.parallel.shard_spec import ShardSpec, shard_spec_of

# Most programs that torch.compile may make of the blocks' code: by mode, shapes and kind of layer.
MOST_PROGRAMS = 64


class LayerKind(Enum):
    """The role of a layer in the network; pipeline stages are split between blocks."""

    EMBEDDING = "embedding"
    BLOCK = "block"
    NORM = "norm"
    MULTI_TOKEN = "multi-token prediction"
    HEAD = "head"


_SELF_CONTAINED = (LayerKind.EMBEDDING, LayerKind.BLOCK)  # layers that read only their own parameters


@dataclass(frozen=True)
class LayerSpec:
    """The description of a layer, built only by the ranks that own it.

    Args:
        name: global name; parameters are named `<name>.<name inside the module>`.
        kind: role in the network.
        cost: parameters and FLOPs.
        build: builds the module, with all matrices zero. The module maps hidden states (the first layer: the
            micro-batch's inputs) and a `StepContext` to hidden states (the last layer: outputs).
        tied_to: the layer whose weight is shared as this one's `weight`. If this rank has that layer, or another one
            with a copy of its weight, it is passed to `build` as `weight`; otherwise `build` creates a copy.
        complete_spec: adds initial values and learning rate to the spec of a parameter, given its global name.
    """

    name: str
    kind: LayerKind
    cost: LayerCost
    build: Callable[..., nn.Module]
    tied_to: str | None = None
    complete_spec: Callable[[str, ShardSpec], ShardSpec] | None = None


class LayerStack(nn.Module):
    """Layers of a network as one module; `named_parameters` yields global names.

    Args:
        specs: the layers in order.
        seed: seed of the initial parameter values; None leaves the matrices zero, for weights to be loaded.
        build: replaces `build_layer`, for callers that must do more.
        initial_values: the implementation that draws the values, which do not depend on it.

    Attributes:
        before_layer: called with the parameters that a layer is about to read; with None for all.
    """

    before_layer: Callable[[Iterable[nn.Parameter] | None], None] | None = None

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        seed: int | None = None,
        build: Callable[[LayerSpec, nn.Parameter | None], nn.Module] | None = None,
        initial_values: Implementation = Implementation.TORCH,
    ) -> None:
        super().__init__()
        self._layers: list[tuple[LayerSpec, nn.Module]] = []
        built: dict[str, nn.Module] = {}
        for spec in specs:
            shared = built.get(spec.tied_to) if spec.tied_to is not None else None
            weight = None if shared is None else _shared_weight(shared, str(spec.tied_to))
            module = (build or build_layer)(spec, weight)
            name_parameters(spec, module, weight)
            if seed is not None:
                draw_initial_values(module, seed, weight, initial_values)
            built[spec.name] = module
            if spec.tied_to is not None:
                built.setdefault(spec.tied_to, module)
            self._layers.append((spec, module))
            _attach(self, spec.name, module)
        takers = [getattr(module, "takes_sum", False) for _, module in self._layers[1:]]
        self._leaves_sum = [
            takes and getattr(module, "leaves_sum", False)
            for (_, module), takes in zip(self._layers, [*takers, False], strict=False)  # a stack may be empty
        ]

    def forward(self, inputs: Any, context: StepContext, layers: range | None = None) -> torch.Tensor:
        """Runs the layers. A block leaves its last addition to the next layer's norm, if that can compute both.

        Args:
            inputs: hidden states; for the first layer of a network, the micro-batch's inputs.
            layers: indices of the consecutive layers to run; None for all.
        """
        layers = range(len(self._layers)) if layers is None else layers
        for index in layers:
            spec, layer = self._layers[index]
            if self.before_layer is not None:  # layers after the blocks may share weights of others
                self.before_layer(layer.parameters() if spec.kind in _SELF_CONTAINED else None)
            leaves_sum = self._leaves_sum[index] and index + 1 < layers.stop
            inputs = layer(inputs, context, leaves_sum=True) if leaves_sum else layer(inputs, context)
        return inputs  # type: ignore[no-any-return]

    def has(self, kind: LayerKind) -> bool:
        return any(spec.kind is kind for spec, _ in self._layers)

    def named_layers(self) -> Iterator[tuple[LayerSpec, nn.Module]]:
        yield from self._layers

    def compile_blocks(self, seed: int, device: torch.device, backend: str) -> None:
        """Compiles each block, see `TransformerBlock.compile_for`.

        Raises:
            ConfigError: a block lacks this method.
        """
        products.prepare_for_compiler()
        torch._dynamo.config.recompile_limit = max(MOST_PROGRAMS, torch._dynamo.config.recompile_limit)
        for spec, module in self._layers:
            if spec.kind is not LayerKind.BLOCK:
                continue
            if not hasattr(module, "compile_for"):
                raise ConfigError(
                    f"--compile: layer {spec.name} is a {type(module).__name__}, which cannot be compiled. Give it the "
                    "method compile_for of a TransformerBlock, or drop --compile."
                )
            module.compile_for(seed, device, backend)  # type: ignore[operator]

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
        """The weight that a layer shares with other layers.

        Raises:
            ConfigError: the layer is not in this stack, or has no weight.
        """
        return _shared_weight(self.layer(name), name)

    def stored_tensors(self) -> Iterator[torch.Tensor]:
        """The tensors of this rank's layers in a checkpoint: their parameters, then their state."""
        yield from self.parameters()
        yield from states_of(self)

    def new_caches(self, capacity: int, prefix: int = 0) -> BatchCaches:
        """Empty caches for a batch of texts of equal length, up to `capacity` tokens; see `BatchCaches`."""
        return BatchCaches(capacity, prefix)


def build_layer(spec: LayerSpec, shared: nn.Parameter | None = None) -> nn.Module:
    """Builds a layer, with its shared weight if this rank has it."""
    return spec.build() if shared is None else spec.build(weight=shared)


def name_parameters(spec: LayerSpec, module: nn.Module, shared: nn.Parameter | None = None) -> None:
    """Sets the global name of every parameter and state (`parameter.global_name`) and completes the shard specs of the
    parameters; a tied copy gets the original's name.

    Args:
        shared: the weight of another layer on this rank, which is already named.
    """
    for inner, state in named_states(module):
        state.global_name = f"{spec.name}.{inner}"  # type: ignore[attr-defined]
    for inner, parameter in module.named_parameters():
        if parameter is shared:
            continue
        owner = spec.tied_to if inner == "weight" else None
        name, placed = f"{owner or spec.name}.{inner}", shard_spec_of(parameter)
        if spec.complete_spec is not None:
            placed = spec.complete_spec(name, placed)
        parameter.global_name = name  # type: ignore[attr-defined]
        parameter.shard_spec = placed if owner is None else placed.as_tied_copy()  # type: ignore[attr-defined]


def parameter_names(specs: Sequence[LayerSpec]) -> list[str]:
    """The global names of all parameters of a network, each once; the layers are built on the meta device."""
    names: dict[str, None] = {}
    for spec in specs:
        with torch.device("meta"):
            module = build_layer(spec)
        name_parameters(spec, module)
        names.update((parameter.global_name, None) for parameter in module.parameters())  # type: ignore[attr-defined]
    return list(names)


def draw_initial_values(
    module: nn.Module,
    seed: int,
    shared: nn.Parameter | None = None,
    implementation: Implementation = Implementation.TORCH,
) -> None:
    """Draws the initial values of the matrices of a named module; norms and biases keep theirs.

    Args:
        shared: the weight of another layer, which already has its values.
    """
    for parameter in module.parameters():
        spec = shard_spec_of(parameter)
        if spec.is_matrix and parameter is not shared:
            name: str = parameter.global_name  # type: ignore[attr-defined]
            draw_weights_(parameter.detach().view(-1), spec, seed, name, implementation=implementation)


def _shared_weight(module: nn.Module, name: str) -> nn.Parameter:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter):
        raise ConfigError(f"layer {name} is a {type(module).__name__}, which has no weight for other layers to share.")
    return weight


def _attach(root: nn.Module, dotted_name: str, module: nn.Module) -> None:
    """Registers a module under a dotted name, creating containers where needed."""
    *path, last = dotted_name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(last, module)
