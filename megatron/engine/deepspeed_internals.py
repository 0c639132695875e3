"""What DeepSpeed keeps to itself: no other file uses a name that its documentation does not promise.

`OptimizerView` shows the fp32 weights and gradients inside the optimizer that DeepSpeed returned; `view_of` chooses its
class by the ZeRO stage. What follows concerns the parameters of ZeRO-3, the pipeline engine and the messages.
tests/engine/deepspeed/test_deepspeed_internals.py holds every name against the installed version.

Source: DeepSpeed 0.19.8, in the files that each part names.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from megatron.engine.ds_config import sub_groups_to_keep
from megatron.engine.gradients.clipping import Clipping
from megatron.engine.gradients.main_gradients import MainGradients
from megatron.engine.gradients.update_gate import UpdateGate
from megatron.engine.grid import PipelineGrid
from megatron.engine.tensor_parts import MasterSlice, tensors_in
from megatron.kernels.optimizer import can_skip
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.messages import all_reduce_sum

# Attributes of the dynamic loss scaler that change from step to step (`runtime/fp16/loss_scaler.py`).
_SCALER_COUNTERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

_IS_COUNTED = attrgetter("tensor_model_parallel")  # what `mark_parameter` has said


class OptimizerView(ABC):
    """The optimizer inside a DeepSpeed engine.

    Attributes:
        optimizer: the torch optimizer, without DeepSpeed's wrapper.
        is_direct: whether it updates the network's own weights, all of them on every data-parallel rank.
        takes_by_hooks: whether hooks of the backward pass take the gradients from the parameters.
    """

    is_direct = False
    takes_by_hooks = True
    _TAKES_FLAGS = False  # whether the update here can be told by a flag on the device to change nothing
    _GROUPS, _REDUCED = "", "averaged_gradients"  # attributes of DeepSpeed's optimizer
    _BUFFERS: tuple[str, ...] = ()  # those in which it keeps gradients before ranks sum them

    def __init__(self, engine: Any) -> None:
        self.optimizer: torch.optim.Optimizer = engine.basic_optimizer
        self._wrapper = engine.optimizer
        self._engine = engine

    def accumulate(self, parameters: Sequence[nn.Parameter]) -> None:  # noqa: B027
        """Takes the gradients of a backward pass that did not go through DeepSpeed's engine."""

    def main_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The sum of a parameter's gradients; None if there were none."""
        return parameter.grad

    def reduce(self, tied: Sequence[tuple[nn.Parameter, Axis]]) -> None:
        """Ends the backward passes of a step: sums tied weights over their axes, then all over data-parallel ranks."""
        for weight, axis in tied:
            gradient = self.main_gradient(weight)
            all_reduce_sum(weight.new_zeros(weight.shape) if gradient is None else gradient, axis)
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.allreduce_gradients()

    @property
    def can_skip(self) -> bool:
        """Whether a flag on the device can drop an update."""
        return self._TAKES_FLAGS and can_skip(self.optimizer)

    def groups(self) -> Sequence[Sequence[nn.Parameter]]:
        """The network's trained parameters, in the groups in which they are divided among ranks."""
        return getattr(self._wrapper, self._GROUPS)  # type: ignore[no-any-return]

    def masters(self) -> Sequence[torch.Tensor]:
        """The tensors that the torch optimizer updates, in the order of its groups."""
        return [tensor for group in self.optimizer.param_groups for tensor in group["params"]]

    @abstractmethod
    def slice_of(self, parameter: nn.Parameter) -> MasterSlice | None:
        """The part of a trained parameter that this rank updates; None if it updates nothing of it."""

    def reduced_gradients(self) -> Iterator[torch.Tensor]:
        """The gradients that this rank holds when the update begins, averaged over the data-parallel ranks."""
        return tensors_in(getattr(self._wrapper, self._REDUCED))

    def gradients(self) -> Iterator[torch.Tensor]:
        """All tensors that hold gradients when the update begins; some of them show the same memory."""
        yield from self.reduced_gradients()
        yield from tensors_in([getattr(self._wrapper, name) for name in self._BUFFERS])
        for group in (*self.groups(), self.masters()):
            for tensor in group:
                yield from tensors_in([tensor.grad, getattr(tensor, "grad_accum", None)])

    def refresh_weights(self) -> None:
        """Makes the network compute with the fp32 weights as they are now; collective."""
        self._wrapper.update_lp_params()

    def norm(self) -> torch.Tensor | float:
        """Global 2-norm of the last step's gradient before clipping; NaN if DeepSpeed took none."""
        norm = getattr(self._wrapper, "_global_grad_norm", None)
        return float("nan") if norm is None else norm

    def loss_scale(self) -> float:
        """The loss scale, in fp16."""
        return float(self._wrapper.cur_scale)

    def loss_scale_state(self) -> dict[str, float]:
        """What changes of the loss scaler from step to step, in fp16."""
        scaler = self._wrapper.loss_scaler
        return {name: getattr(scaler, name) for name in _SCALER_COUNTERS if hasattr(scaler, name)}

    def restore_loss_scale(self, state: Mapping[str, float]) -> None:
        """Sets what `loss_scale_state` returned, and nothing else that a record may name."""
        for name in _SCALER_COUNTERS:
            if name in state:
                setattr(self._wrapper.loss_scaler, name, state[name])

    def guard(self, gate: UpdateGate) -> None:
        """Asks for permission before every update.

        A rank whose optimizer dropped an update that others make joins them in gathering the weights that each has
        updated.
        """
        update, step = self.optimizer.step, self._wrapper.step

        def settled_step(*arguments: Any, **options: Any) -> None:
            step(*arguments, **options)
            if gate.is_left_behind():
                self.refresh_weights()

        self.optimizer.step = lambda *_: update() if gate.may_update() else None  # type: ignore[method-assign, assignment]
        self._wrapper.step = settled_step


class DirectView(OptimizerView):
    """ZeRO 0: DeepSpeed hands the torch optimizer back.

    Its own norm counts a tied weight on both stages of a pipeline and omits the replicated parameters of later ones.

    Args:
        group: the ranks that share a parameter.
    """

    is_direct, takes_by_hooks = True, False
    _TAKES_FLAGS = True

    def __init__(self, engine: Any, group: Axis, clipping: Clipping) -> None:
        super().__init__(engine)
        self._clipping = clipping
        self._counted = [parameter for group in self.groups() for parameter in group if _IS_COUNTED(parameter)]
        engine.clip_fp32_gradients = self._measure
        if group.size == 1:  # DeepSpeed would copy all gradients twice to average them
            engine.buffered_allreduce_fallback = lambda *_, **__: self._complete()

    def groups(self) -> Sequence[Sequence[nn.Parameter]]:
        """The groups of the torch optimizer."""
        return [group["params"] for group in self.optimizer.param_groups]

    def slice_of(self, parameter: nn.Parameter) -> MasterSlice:
        """All of it."""
        return MasterSlice(0, parameter.data.view(-1), parameter, 0)

    def reduced_gradients(self) -> Iterator[torch.Tensor]:
        """The gradient of each parameter."""
        return tensors_in([parameter.grad for parameter in self.masters()])

    def refresh_weights(self) -> None:
        """Nothing to do: the weights are those that the optimizer updates."""

    def guard(self, gate: UpdateGate) -> None:
        """Leaves every update to a gate, which clips as well."""
        self._wrapper.step = lambda: gate.update(self.optimizer, self._clipping.factor(torch.as_tensor(self.norm())))

    def _complete(self) -> None:
        """A parameter without a gradient has one of zero, so that every optimizer updates it."""
        for parameter in self.masters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _measure(self) -> None:
        gradients = [parameter.grad for parameter in self._counted]
        self._wrapper._global_grad_norm = self._clipping.norm([each for each in gradients if each is not None])


class PartitionedView(OptimizerView):
    """ZeRO 1 and 2 (`runtime/zero/stage_1_and_2.py`): each rank has one flat fp32 partition of each group.

    The base optimizer's state is read directly: DeepSpeed links fragments of it for the first group only.
    """

    _GROUPS = "bit16_groups"
    _BUFFERS: tuple[str, ...] = ("all_grad_tensors",)

    def slice_of(self, parameter: nn.Parameter) -> MasterSlice | None:
        """Where `utils/mixed_precision_linkage.py` has noted that it lies."""
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        flat = self.optimizer.param_groups[mapping.param_group_index]["params"][0]
        address = mapping.hp_fragment_address
        values = flat.data.narrow(0, address.start, address.numel)
        return MasterSlice(mapping.lp_fragment_address.start, values, flat, address.start)


class AccumulatedView(PartitionedView):
    """ZeRO 1 in bf16 with accumulation in fp32 (`runtime/bf16_optimizer.py`): each rank accumulates all gradients.

    DeepSpeed's accumulation and its step go from parameter to parameter and wait for the device; both are done here.
    With `immediate_grad_update` its hooks accumulate during the backward pass.

    Args:
        group: the ranks that share a parameter.
    """

    _GROUPS, _REDUCED, _BUFFERS = "bf16_groups", "fp32_groups_gradients_flat", ()
    _TAKES_FLAGS = True

    def __init__(self, engine: Any, group: Axis, clipping: Clipping) -> None:
        super().__init__(engine)
        wrapper, self._clipping = self._wrapper, clipping
        self.takes_by_hooks = bool(wrapper.immediate_grad_update)
        if group.size == 1:
            engine.buffered_allreduce_fallback = lambda *_, **__: None
        self._main = MainGradients(wrapper.fp32_groups_gradients_flat, wrapper.bf16_groups, _IS_COUNTED)
        # the network's own weights, unless each rank updates a part of them, and all are gathered afterwards
        self._copies = list(wrapper.bf16_partitioned_groups) if group.size == 1 else ()
        if not wrapper.immediate_grad_update:
            for parameter, view in zip(self._main.parameters, self._main.views, strict=True):
                parameter._hp_grad = view  # type: ignore[attr-defined]  # of a tied weight, stages add it up
            wrapper.update_hp_grads = lambda clear_lp_grads=False: self._main.take()
            wrapper.clear_hp_grads = self._main.clear
            wrapper.clear_lp_grads = lambda set_to_none=True: self._main.release()

    def accumulate(self, parameters: Sequence[nn.Parameter]) -> None:
        """Adds them to the flat sums."""
        self._main.take()
        self._main.release()

    def main_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Its part of the flat sums."""
        return parameter._hp_grad  # type: ignore[attr-defined,no-any-return]

    def guard(self, gate: UpdateGate) -> None:
        """Leaves every update to a gate, which clips as well."""

        def step() -> None:
            if not self._wrapper.immediate_grad_update:
                self._main.complete()
            self._wrapper._global_grad_norm = norm = self._clipping.norm(self._main.counted)
            for master, part in zip(self.masters(), self._wrapper.fp32_groups_gradient_flat_partition, strict=True):
                master.grad = part
            if gate.update(self.optimizer, self._clipping.factor(norm), self._copies) and not self._copies:
                self.refresh_weights()
            self._wrapper.clear_hp_grads()

        self._wrapper.step = step


class SubGroupView(OptimizerView):
    """ZeRO 3 (`runtime/zero/stage3.py`): parameters are split into equal, padded parts; sub-groups hold the fp32 parts.

    Args:
        rank: position among the ranks that share a parameter.
    """

    _GROUPS, _BUFFERS = "fp16_groups", ("grad_partitions_flat_buffer",)

    def __init__(self, engine: Any, rank: int) -> None:
        super().__init__(engine)
        self._rank = rank

    def masters(self) -> Sequence[torch.Tensor]:
        """The flat tensor of each sub-group; they are in the torch optimizer only while it updates them."""
        return self._wrapper.fp32_partitioned_groups_flat  # type: ignore[no-any-return]

    def slice_of(self, parameter: nn.Parameter) -> MasterSlice | None:
        """This rank's part, without its padding."""
        group, offset, length = self._wrapper.grad_position[self._wrapper.get_param_id(parameter)]
        flat = self.masters()[group]
        first = self._rank * length
        held = max(0, min(length, whole_numel(parameter) - first))
        return MasterSlice(first, flat.data.narrow(0, offset, held), flat, offset) if held else None

    def refresh_weights(self) -> None:
        """Copies the fp32 parts into the network's partitions and into the persistent parameters, which every rank
        keeps whole.
        """
        for flat, parameters in zip(self.masters(), self.groups(), strict=True):
            for parameter in parameters:
                _, offset, length = self._wrapper.grad_position[self._wrapper.get_param_id(parameter)]
                parameter.ds_tensor.data.copy_(flat.data.narrow(0, offset, length))  # type: ignore[attr-defined]
        persistent = self._wrapper.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)


def view_of(engine: Any, zero_stage: int, group: Axis, clipping: Clipping) -> OptimizerView:
    """The view of a DeepSpeed engine's optimizer; see its classes for the arguments."""
    if zero_stage == 0:
        return DirectView(engine, group, clipping)
    if zero_stage == 3:
        return SubGroupView(engine, group.rank)
    if isinstance(engine.optimizer, BF16_Optimizer):
        return AccumulatedView(engine, group, clipping)
    return PartitionedView(engine)


def keep_on_device(wrapper: Any, ratio: float, device: torch.device) -> list[int]:
    """Moves all but this share of the master weights and their gradients back to the device, before the first step, and
    returns the sub-groups that were moved.

    DeepSpeed's own second optimizer, for the part on the device, wants DeepSpeedCPUAdam, which has to be compiled,
    divides sub-groups by their number, whatever their size, and never changes the learning rate of its first group.
    Here one AdamW of torch updates each sub-group where it is (`runtime/zero/stage3.py`, `_optimizer_step`).
    """
    flats = wrapper.fp32_partitioned_groups_flat
    kept = sub_groups_to_keep([flat.numel() for flat in flats], ratio)
    for number in kept:
        flat, gradient = flats[number], flats[number].grad
        flat.grad = None
        flat.data = flat.data.to(device)
        if gradient is not None:
            flat.grad = gradient.to(device)
        wrapper.subgroup_to_device[number] = device.type
    wrapper.backup_optimizer = wrapper.optimizer  # torch's updates a tensor where it is
    return kept


def partition_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """What ZeRO-3 leaves of a parameter on this rank, padding included; None if it does not divide it.

    Shapes: result `[n]`.
    """
    partition = getattr(parameter, "ds_tensor", None)
    return None if partition is None else partition.data.view(-1)


def is_whole(parameter: nn.Parameter) -> bool:
    """Whether all elements of a parameter are on this rank: ZeRO-3 does not divide it, or has gathered it."""
    return getattr(parameter, "ds_status", None) in (None, ZeroParamStatus.AVAILABLE)


def whole_numel(parameter: nn.Parameter) -> int:
    """Elements of a parameter, whether or not ZeRO-3 divides it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def mark_parameter(parameter: nn.Parameter, *, is_counted: bool, is_tied_copy: bool = False) -> None:
    """Says whether this rank counts a parameter in the gradient norm, and whether another stage owns it."""
    parameter.tensor_model_parallel = is_counted  # type: ignore[attr-defined]
    parameter.ds_pipe_replicated = is_tied_copy  # type: ignore[attr-defined]


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


def skip_shared_memory_build() -> None:
    """Keeps DeepSpeed from compiling CPU collectives as it joins: half a minute, and an error without a compiler."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def skip_optimizer_check() -> None:
    """Keeps DeepSpeed from comparing each optimizer with its Muon, which compiles functions, and from a warning.

    The reduction of gradients at ZeRO 1 and 2 makes the comparison as well.
    """
    deepspeed.runtime.engine.is_zero_supported_optimizer = lambda optimizer: True
    deepspeed.runtime.compiler.compile = lambda *_, **__: lambda function: function


@contextlib.contextmanager
def replaced_backend(wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Has DeepSpeed send its messages in the block through what `wrap` makes of its backend, if it has one."""
    backend = deepspeed.comm.comm.cdb
    deepspeed.comm.comm.cdb = None if backend is None else wrap(backend)
    try:
        yield
    finally:
        deepspeed.comm.comm.cdb = backend
