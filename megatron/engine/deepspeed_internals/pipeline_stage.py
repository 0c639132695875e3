"""A stage for DeepSpeed's pipeline engine, and the instructions of its schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import nn

from megatron.engine.deepspeed_internals.optimizer_views import OwningView
from megatron.engine.grid import PipelineGrid
from megatron.parallel.mesh import ParallelMesh


class BuiltStage(PipelineModule):
    """A `PipelineModule` of one stage whose layers, grid and process groups exist already.

    The base class's constructor would build them. It is therefore not called, and what the pipeline engine reads is
    set here (`runtime/pipe/engine.py`, `runtime/pipe/module.py`).
    """

    def __init__(self, mesh: ParallelMesh, loss: Callable[..., torch.Tensor]) -> None:
        nn.Module.__init__(self)
        self._grid = PipelineGrid(mesh)
        self.loss_fn = loss
        self._local_start, self._local_stop = mesh.pp.rank, mesh.pp.rank + 1
        self.tied_comms: dict[str, Any] = {}
        self.activation_checkpoint_interval = 0
        self.activation_checkpoint_func = None
        self.dynamic_shape = False

    def get_additional_losses(self) -> None:
        """None: the engine collects metrics itself."""


def call_before_instructions(engine: Any, call: Callable[[type], None]) -> None:
    """Makes one pipeline engine call a function with the class of each instruction of its schedule, before it."""

    def announced(kind: type, execute: Callable[..., None]) -> Callable[..., None]:
        def run(itself: Any, **arguments: Any) -> None:
            call(kind)
            execute(itself, **arguments)

        return run

    engine._INSTRUCTION_MAP = {kind: announced(kind, execute) for kind, execute in engine._INSTRUCTION_MAP.items()}


def reduce_in(engine: Any, view: OwningView) -> None:
    """Makes one pipeline engine average gradients in a view, and, where that has flat ones, add them up there: as it
    does with DeepSpeed's optimizer for bf16.
    """
    wrapper = engine.optimizer
    engine.buffered_allreduce_fallback = lambda *_, **__: view.reduce()
    if not view.is_direct:
        engine.using_bf16_optimizer = True
        for name in ("update_hp_grads", "backward_epilogue"):
            setattr(wrapper, name, lambda *_, **__: view.accumulate())
        wrapper.clear_lp_grads = lambda *_, **__: None


def set_loss_scale(engine: Any, scale: float) -> None:
    """Sets what a pipeline engine multiplies the loss by, in fp16: the scale of DeepSpeed's optimizer."""
    engine.optimizer.loss_scaler.cur_scale = scale
