"""A stage for DeepSpeed's pipeline engine, and hooks into that engine."""

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
    """A `PipelineModule` of one stage with existing layers, grid and process groups."""

    def __init__(self, mesh: ParallelMesh, loss: Callable[..., torch.Tensor]) -> None:
        # The base class's constructor would build its own. Instead, set all that the pipeline engine reads
        # (`runtime/pipe/engine.py`, `runtime/pipe/module.py`).
        nn.Module.__init__(self)
        self._grid = PipelineGrid(mesh)
        self.loss_fn = loss
        self._local_start, self._local_stop = mesh.pp.rank, mesh.pp.rank + 1
        self.tied_comms: dict[str, Any] = {}
        self.activation_checkpoint_interval = 0
        self.activation_checkpoint_func = None
        self.dynamic_shape = False

    def get_additional_losses(self) -> None:
        """Returns None: metrics are collected elsewhere."""


def call_before_instructions(engine: Any, call: Callable[[type], None]) -> None:
    """Makes a pipeline engine call a function before each instruction, with the instruction's class."""

    def with_call(kind: type, execute: Callable[..., None]) -> Callable[..., None]:
        def run(itself: Any, **arguments: Any) -> None:
            call(kind)
            execute(itself, **arguments)

        return run

    engine._INSTRUCTION_MAP = {kind: with_call(kind, execute) for kind, execute in engine._INSTRUCTION_MAP.items()}


def reduce_in(engine: Any, view: OwningView) -> None:
    """Makes a pipeline engine average gradients by a view, and accumulate them there if the view has flat buffers, as
    the engine does with DeepSpeed's bf16 optimizer.
    """
    wrapper = engine.optimizer
    engine.buffered_allreduce_fallback = lambda *_, **__: view.reduce()
    if not view.is_direct:
        engine.using_bf16_optimizer = True
        for name in ("update_hp_grads", "backward_epilogue"):
            setattr(wrapper, name, lambda *_, **__: view.accumulate())
        wrapper.clear_lp_grads = lambda *_, **__: None


def set_loss_scale(engine: Any, scale: float) -> None:
    """Sets the loss scale of a pipeline engine in fp16."""
    engine.optimizer.loss_scaler.cur_scale = scale
