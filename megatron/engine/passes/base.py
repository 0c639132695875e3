"""The interface for running micro-batches through the network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch import nn

from megatron.device import GraphCapturer
from megatron.engine.deepspeed_internals.base_view import OptimizerView
from megatron.engine.gradients.gradient_sum import Partial, Tied
from megatron.engine.micro_batch import DeviceBatch
from megatron.engine.passes.step_loss import StepLoss
from megatron.parallel.schedule.actions import Placement

_View = TypeVar("_View", bound=OptimizerView)


class Passes(ABC, Generic[_View]):
    """Runs the micro-batches of a global batch through the network.

    Args:
        module: the layers of this rank, which DeepSpeed is initialized with.

    Attributes:
        module: the argument.
        placement: the placement of chunks, if a pipeline schedule runs them; None otherwise.
    """

    placement: Placement | None = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def connect(self, deepspeed: Any, view: _View, partial: Partial, tied: Tied, enter: Callable[[str], None]) -> None:
        """Connects the network to its optimizer, after DeepSpeed's initialization.

        Args:
            deepspeed: the engine that updates the weights.
            view: its optimizer.
            partial, tied: see `GradientOwner.sum_over_ranks`.
            enter: called with each phase that begins.
        """
        self._deepspeed, self._view, self._enter = deepspeed, view, enter
        view.sum_over_ranks(partial, tied)

    @abstractmethod
    def train(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        """Runs forward and backward passes, reduces the gradients and updates the weights."""

    @abstractmethod
    def evaluate(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        """Runs forward passes without gradients; the network is in evaluation mode."""

    def use_graphs(self, capturer: GraphCapturer) -> None:
        """Captures passes as CUDA graphs from now on; the caller has checked that `graph_refusal` is None."""
