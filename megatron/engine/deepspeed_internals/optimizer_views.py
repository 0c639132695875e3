"""Views of the optimizers that DeepSpeed returns, with their fp32 weights and gradients.

With ZeRO 0, 1 and 2, `engine/gradients/` accumulates, averages, measures and clips gradients instead of DeepSpeed:

    ZeRO, dtype      view              gradients accumulate in        done here instead of by DeepSpeed
    0, fp32          DirectView        .grad                          mean over ranks, norm, clipping, step
    1, bf16          AccumulatedView   DeepSpeed's flat fp32 buffers  the same, and accumulation
    1, fp32, fp16    PartitionedView   separate flat fp32 buffers     the same; DeepSpeed's hooks are removed
    2                PartitionedView   this rank's fp32 part          the same
    3                SubGroupView      DeepSpeed's buffers            the decision to update

At stage 1, bf16 is handled like fp32 if the optimizer is offloaded or gradients accumulate in bf16. DeepSpeed
initializes and partitions the parameter groups, each of which is a bucket.
"""

from __future__ import annotations

import dataclasses
import weakref
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn

from megatron.engine.buckets.averaging import Averaging
from megatron.engine.buckets.bucket_queue import Buckets
from megatron.engine.buckets.flat_bucket import FlatGroup
from megatron.engine.buckets.parameter_groups import is_partial
from megatron.engine.buckets.weight_gathers import WeightGathers
from megatron.engine.deepspeed_internals.base_view import OptimizerView, loss_scale_of
from megatron.engine.deepspeed_internals.experts import is_expert
from megatron.engine.deepspeed_internals.parameters import is_measured, whole_numel
from megatron.engine.gradients.clipping import Clipping
from megatron.engine.gradients.direct_gradients import DirectGradients
from megatron.engine.gradients.gradient_owner import GradientOwner
from megatron.engine.gradients.gradient_stats import GradientStats
from megatron.engine.gradients.gradient_sum import GradientSum
from megatron.engine.gradients.main_gradients import MainGradients
from megatron.engine.gradients.partition_gradients import PartitionGradients
from megatron.engine.gradients.update_gate import UpdateGate
from megatron.engine.tensor_parts import MasterSlice, has_whole_gradient, tensors_in
from megatron.kernels.optimizer import AdamW, can_skip
from megatron.parallel.mesh import ParallelMesh


class OwningView(GradientOwner, OptimizerView):
    """The optimizer of ZeRO 0, 1 or 2; DeepSpeed does not accumulate, average, measure or clip gradients.

    Args:
        mesh: determines the ranks that share a parameter.
        clipping: measures and clips gradients.
        buckets: their size, and whether messages overlap with computation.
        parameters: of the network, in order.
    """

    def __init__(
        self,
        engine: Any,
        mesh: ParallelMesh,
        clipping: Clipping,
        buckets: Buckets,
        parameters: Iterable[nn.Parameter],
    ) -> None:
        OptimizerView.__init__(self, engine)
        self._buckets = buckets
        self._device, self._implementation = clipping.device, clipping.implementation
        self._scale = loss_scale_of(self._wrapper.loss_scaler, clipping.device) if self.is_scaled else None
        # `_copies` are the network's weights, if an update writes them besides the optimizer's. `_updates_network` is
        # True if it writes all of them; with several ranks, each updates a part, and the parts are gathered.
        self._copies: Sequence[Sequence[torch.Tensor]] = ()
        self._updates_network = False
        grouped = {id(parameter) for group in self.groups() for parameter in group}
        trained = [parameter for parameter in parameters if id(parameter) in grouped]
        factor = engine.gradient_predivide_factor() if engine.postscale_gradients() else 1.0
        how = (engine.communication_data_type, None if factor == 1.0 else factor, buckets.exchanged_dtype)
        averaging = Averaging(mesh.gradient, *how)
        if any(map(is_expert, trained)):
            experts = Averaging(mesh.expert_gradient, *how, copies=mesh.gradient.size)
            averaging = dataclasses.replace(averaging, experts=experts, is_expert=is_expert)
        overlaps = buckets.overlap and not _is_alone(averaging)
        GradientOwner.__init__(self, self._new_sum(trained, averaging), clipping, trained, overlaps=overlaps)
        engine.clip_fp32_gradients = lambda: None
        engine.zero_grad = self._wrapper.zero_grad = lambda *_, **__: None  # accumulation frees all gradients
        engine.set_gradient_accumulation_boundary(True)  # every call of its `step` updates

    @abstractmethod
    def _new_sum(self, trained: Sequence[nn.Parameter], averaging: Averaging) -> GradientSum:
        """Builds the accumulator of gradients."""

    @property
    def can_skip(self) -> bool:
        """True if the optimizer can skip updates and is on the device of the gradients."""
        return can_skip(self.optimizer) and all(master.device == self._device for master in self.masters())

    def gradient_stats(
        self, layers: Sequence[str], measures: Collection[str], trained: Sequence[nn.Parameter], mesh: ParallelMesh
    ) -> GradientStats | None:
        matrices = (each for each in trained if is_measured(each) and has_whole_gradient(each))
        return GradientStats(layers, measures, self._sum, matrices, mesh) if measures else None

    def gradients(self) -> Iterator[torch.Tensor]:
        """Accumulated gradients, `.grad`, and the optimizer's gradients."""
        yield from self.sums()
        yield from tensors_in([master.grad for master in self.masters()])

    def guard(self, gate: UpdateGate) -> None:
        """Replaces the step of DeepSpeed's optimizer: the gate decides, and clipping and loss scaling are done here."""

        def step(*_: Any, **__: Any) -> None:
            self.await_weights()  # of layers that no forward pass has used
            norm = self.measure(self._scale)
            self._wrapper._global_grad_norm = norm
            if self.update(self.optimizer, gate, norm, self._copies, self._scale) and not self._updates_network:
                self.refresh_weights()
            self._sum.clear()

        self._wrapper.step = step

    def loss_scale(self) -> float | torch.Tensor:
        return 1.0 if self._scale is None else self._scale.value

    def loss_scale_state(self) -> dict[str, float]:
        return {} if self._scale is None else self._scale.counters()

    def restore_loss_scale(self, state: Mapping[str, float]) -> None:
        if self._scale is not None:
            self._scale.restore(state)


class DirectView(OwningView):
    """ZeRO 0: DeepSpeed returns the torch optimizer."""

    is_direct = True

    def _new_sum(self, trained: Sequence[nn.Parameter], averaging: Averaging) -> GradientSum:
        elements, overlaps, _ = self._buckets
        return DirectGradients(trained, is_measured, averaging, elements, is_partial, overlaps=overlaps)

    def groups(self) -> Sequence[Sequence[nn.Parameter]]:
        return [group["params"] for group in self.optimizer.param_groups]

    def slice_of(self, parameter: nn.Parameter) -> MasterSlice:
        return MasterSlice(0, parameter.data.view(-1), parameter, 0)

    def refresh_weights(self) -> None:
        """Does nothing: the optimizer updates the network's own weights."""


class PartitionedView(OwningView):
    """ZeRO 1 and 2 (`runtime/zero/stage_1_and_2.py`): each rank has one flat fp32 partition of each group.

    Reads the torch optimizer's state directly: DeepSpeed links its fragments only for the first group.
    """

    _GROUPS, _FLAT = "bit16_groups", "bit16_groups_flat"

    def _new_sum(self, trained: Sequence[nn.Parameter], averaging: Averaging) -> GradientSum:
        wrapper = self._wrapper
        for hook in wrapper._grad_acc_hooks:
            hook.remove()
        flats = getattr(wrapper, self._FLAT)
        groups = [FlatGroup.of(*each) for each in zip(self.groups(), flats, strict=True)]
        self._order = {id(parameter): index for index, parameter in enumerate(trained)}
        axes = [averaging.of(group.parameters[0]).axis for group in groups]
        self._gathers = WeightGathers(flats, axes, groups, self._order, overlaps=self._buckets.overlap)
        self._parts = [flat.chunk(axis.size)[axis.rank] for flat, axis in zip(flats, axes, strict=True)]
        return self._new_flat_sum(groups, averaging)

    def refresh_weights(self) -> None:
        """Copies this rank's fp32 parts to the network, and starts to gather those of the others."""
        self.await_weights()
        with torch.no_grad():
            for part, master in zip(self._parts, self.masters(), strict=True):
                if part.data_ptr() != master.data_ptr():
                    part.copy_(master)
        self._gathers.start()

    def await_weights(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        self._gathers.wait(parameters)

    def _new_flat_sum(self, groups: Sequence[FlatGroup], averaging: Averaging) -> GradientSum:
        wrapper, masters, device = self._wrapper, self.masters(), self._device
        dtype = wrapper.gradient_accumulation_dtype
        is_whole = _is_alone(averaging) and masters[0].device == device
        self._updates_network = is_whole
        if not self._update_in_place(groups, averaging) and is_whole:
            self._copies = list(wrapper.parallel_partitioned_bit16_groups)
        how = (groups, is_measured, averaging, self._implementation, self._order)
        unflattened, overlaps = isinstance(self.optimizer, AdamW), self._buckets.overlap
        if not wrapper.partition_gradients:
            buffers = [torch.zeros(group.length, dtype=dtype, device=device) for group in groups]
            return MainGradients(buffers, *how, takes_unflattened=is_whole and unflattened, overlaps=overlaps)
        parts = [torch.zeros_like(each, dtype=dtype) if each.grad is None else each.grad for each in masters]
        if is_whole:
            return MainGradients(parts, *how, takes_unflattened=unflattened)
        return PartitionGradients(parts, groups, is_measured, averaging, self._order, overlaps=overlaps)

    def _update_in_place(self, groups: Sequence[FlatGroup], averaging: Averaging) -> bool:
        """Makes the optimizer update this rank's part of the network's weights in place of DeepSpeed's copy.

        Returns:
            False if the weights are not float32, or the copy is in host memory.
        """
        ranks = [averaging.of(group.parameters[0]).axis.rank for group in groups]
        partitions = zip(self._wrapper.parallel_partitioned_bit16_groups, ranks, strict=True)
        parts, masters = [partition[rank] for partition, rank in partitions], self.masters()
        if self._wrapper.cpu_offload or any(part.dtype is not torch.float32 for part in parts):
            return False
        for master, part, group in zip(masters, parts, groups, strict=True):
            master.data = part.data
            for mapping in (getattr(parameter, "_hp_mapping", None) for parameter in group.parameters):
                if mapping is not None:  # it would keep DeepSpeed's copy in memory
                    address = mapping.hp_fragment_address
                    mapping.hp_fragment = part.data.narrow(0, address.start, address.numel)
        return True

    def slice_of(self, parameter: nn.Parameter) -> MasterSlice | None:
        # recorded by DeepSpeed's `utils/mixed_precision_linkage.py`
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        flat = self.optimizer.param_groups[mapping.param_group_index]["params"][0]
        address = mapping.hp_fragment_address
        values = flat.data.narrow(0, address.start, address.numel)
        return MasterSlice(mapping.lp_fragment_address.start, values, flat, address.start)


class AccumulatedView(PartitionedView):
    """ZeRO 1 in bf16 with accumulation in fp32, in DeepSpeed's buffers (`runtime/bf16_optimizer.py`)."""

    _GROUPS, _FLAT = "bf16_groups", "bf16_groups_flat"

    def _new_flat_sum(self, groups: Sequence[FlatGroup], averaging: Averaging) -> GradientSum:
        wrapper = self._wrapper
        wrapper.clear_hp_grads = lambda: None
        self.takes_by_hooks = bool(wrapper.immediate_grad_update)
        is_alone = _is_alone(averaging)
        self._copies, self._updates_network = list(wrapper.bf16_partitioned_groups) if is_alone else [], is_alone
        if wrapper.immediate_grad_update:
            view = weakref.proxy(self)  # as in `send_in_backward`
            for parameter in (parameter for group in groups for parameter in group.parameters):
                parameter.register_post_accumulate_grad_hook(lambda each: view.accumulate([each]))
        # Hooks free each gradient before the next one is computed.
        takes_unflattened = is_alone and isinstance(self.optimizer, AdamW) and not self.takes_by_hooks
        how = (groups, is_measured, averaging, self._implementation, self._order)
        buffers, overlaps = wrapper.fp32_groups_gradients_flat, self._buckets.overlap
        return MainGradients(buffers, *how, takes_unflattened=takes_unflattened, overlaps=overlaps)


class SubGroupView(OptimizerView):
    """ZeRO 3 (`runtime/zero/stage3.py`): parameters are split into equal, padded parts, held in fp32 by sub-groups."""

    takes_by_hooks = True
    _GROUPS = "fp16_groups"

    def masters(self) -> Sequence[torch.Tensor]:
        """The flat tensor of each sub-group; the torch optimizer has each only while updating it."""
        return self._wrapper.fp32_partitioned_groups_flat  # type: ignore[no-any-return]

    def slice_of(self, parameter: nn.Parameter) -> MasterSlice | None:
        """This rank's part, without its padding."""
        group, offset, length = self._wrapper.grad_position[self._wrapper.get_param_id(parameter)]
        flat = self.masters()[group]
        first = parameter.ds_zero_partition_rank * length  # type: ignore[attr-defined]
        held = max(0, min(length, whole_numel(parameter) - first))
        return MasterSlice(first, flat.data.narrow(0, offset, held), flat, offset) if held else None

    def reduced_gradients(self) -> Iterator[torch.Tensor]:
        return tensors_in(self._wrapper.averaged_gradients)

    def gradients(self) -> Iterator[torch.Tensor]:
        """Averaged gradients, DeepSpeed's accumulation buffer, and `.grad`."""
        yield from self.reduced_gradients()
        yield from tensors_in(self._wrapper.grad_partitions_flat_buffer)
        for group in (*self.groups(), self.masters()):
            yield from tensors_in([tensor.grad for tensor in group])

    def guard(self, gate: UpdateGate) -> None:
        """Makes the gate decide after DeepSpeed's optimizer, before torch's.

        A rank whose DeepSpeed optimizer skipped an update that others apply takes part in gathering their weights.
        """
        update, step = self.optimizer.step, self._wrapper.step

        def settled_step(*arguments: Any, **options: Any) -> None:
            step(*arguments, **options)
            if gate.missed_update():
                self.refresh_weights()

        self.optimizer.step = lambda *_: update() if gate.may_update() else None  # type: ignore[method-assign, assignment]
        self._wrapper.step = settled_step

    def refresh_weights(self) -> None:
        """Copies the fp32 parts to the network's partitions, and gathers persistent parameters, which stay whole."""
        for flat, parameters in zip(self.masters(), self.groups(), strict=True):
            for parameter in parameters:
                _, offset, length = self._wrapper.grad_position[self._wrapper.get_param_id(parameter)]
                parameter.ds_tensor.data.copy_(flat.data.narrow(0, offset, length))  # type: ignore[attr-defined]
        persistent = self._wrapper.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)


def _is_alone(averaging: Averaging) -> bool:
    """True if no gradient is averaged with other ranks."""
    return averaging.axis.size == 1 and averaging.experts is None


def view_of(
    engine: Any,
    zero_stage: int,
    mesh: ParallelMesh,
    norm_limit: float,
    buckets: Buckets,
    parameters: Iterable[nn.Parameter],
) -> OptimizerView:
    """The view of a DeepSpeed engine's optimizer; see `Clipping` for `norm_limit`."""
    how = mesh, Clipping(norm_limit, mesh.model, mesh.device, mesh.kernels.optimizer), buckets, parameters
    if zero_stage == 0:
        return DirectView(engine, *how)
    if zero_stage == 3:
        return SubGroupView(engine)
    if isinstance(engine.optimizer, BF16_Optimizer):
        return AccumulatedView(engine, *how)
    return PartitionedView(engine, *how)
