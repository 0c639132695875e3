"""State of a network besides parameters: tensors that a module updates once a step from recorded statistics.

It is saved in checkpoints under its global name, like a parameter, and equal on all ranks that hold the module.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megatron.parallel.shard_spec import ShardSpec


class StepState(nn.Module):
    """A module with such state, which stays in float32 in a half-precision network and is not partitioned by ZeRO."""

    def add_state(self, name: str, values: torch.Tensor, spec: ShardSpec, *, is_optional: bool = False) -> None:
        """Adds a state tensor as the attribute `name`.

        Args:
            is_optional: keep the initial value if a checkpoint lacks it.
        """
        state = values.float()  # DeepSpeed's ZeRO-3 creates all tensors in the network's dtype
        state.shard_spec, state.is_optional = spec, is_optional  # type: ignore[attr-defined]
        self.register_buffer(name, state)

    @abstractmethod
    def after_step(self, totals: Mapping[str, torch.Tensor], is_applied: torch.Tensor) -> None:
        """Updates the state in place, without synchronizing.

        Shapes: is_applied `[]` bool.

        Args:
            totals: the recorded statistics by name, summed over the global batch; equal on all ranks.
            is_applied: True if the optimizer's update was applied; otherwise nothing may change.
        """

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        states = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, state in states.items():
            moved = self._buffers[name]
            if state is not None and moved is not None:
                state.data = state.data.to(moved.device)
                self._buffers[name] = state
        return self


def step_states(module: nn.Module) -> Iterator[StepState]:
    """The modules with state in a module, itself included."""
    return (inner for inner in module.modules() if isinstance(inner, StepState))


def states_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """The state tensors of a module and those within it, in a fixed order."""
    return (state for _, state in named_states(module))


def named_states(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The state tensors with their names in the module."""
    for path, inner in module.named_modules():
        if isinstance(inner, StepState):
            for name, state in inner.named_buffers(recurse=False):
                yield f"{path}.{name}" if path else name, state
