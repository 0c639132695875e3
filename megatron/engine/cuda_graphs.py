"""Forward, loss and backward of a micro-batch as one CUDA graph, launched by a single call.

Without a graph, the host launches a thousand kernels per micro-batch, which takes longer than a small network's work.
A graph replays kernels on fixed addresses: inputs are copied to its input buffers, and it writes loss, sums of the
objective and gradients to others.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from megatron import log
from megatron.config import RunConfig
from megatron.config.architecture.positions import ALIBI
from megatron.device import CapturedWork, CaptureError, GraphCapturer
from megatron.engine.micro_batch import DeviceBatch
from megatron.kernels.attention.bounded import fits_flash
from megatron.kernels.attention.gpu import has_varlen
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max

AUTO, OFF = "auto", "off"
WARM_UP_MICRO_BATCHES = 3  # of each shape before capture, while libraries choose kernels and allocate workspaces
MOST_GRAPHS = 2  # each holds the gradients of all parameters


def graph_refusal(config: RunConfig, device_type: str, *, by_hooks: bool) -> str | None:
    """The reason why the micro-batches of a run cannot be captured as CUDA graphs; None if they can.

    A graph runs no host code: anything that the host decides or reads in a micro-batch would be frozen at capture.

    Args:
        by_hooks: hooks of the backward pass take the gradients from the parameters.
    """
    model, parallel = config.model, config.parallel
    stage = parallel.effective_zero_stage
    bounded = config.documents.reset_attention_mask or config.documents.reset_position_ids
    bounded = bounded or config.loss.has_prefixes or config.finetuning.pack_examples
    bounded = bounded or model.attention_logit_softcap is not None
    is_windowed = model.attention_window is not None
    flashes = (
        is_windowed and fits_flash(getattr(torch, config.precision.dtype_name), model.kv_channels) and has_varlen()
    )
    reasons = {
        "there is no GPU": device_type != "cuda",
        "DeepSpeed's pipeline engine runs the stages": parallel.pipeline_model_parallel_size > 1
        and parallel.pipeline_engine == "deepspeed",
        "ZeRO stage 3 fetches the weights of a layer by hooks": stage == 3,
        "each gradient is added within the backward pass (bf16.immediate_grad_update of --deepspeed_config)": by_hooks,
        "the host reads the number of tokens of each expert": model.num_experts > 1 and not model.drops_tokens,
        "ring attention exchanges keys and values between its parts": parallel.ring_size > 1,
        f"messages of {parallel.distributed_backend} inside the blocks cannot be captured": (
            parallel.tensor_model_parallel_size * parallel.ulysses_size * parallel.expert_model_parallel_size > 1
            and parallel.distributed_backend != "nccl"
        ),
        "fused attention seeds a generator for dropout in each call": (
            model.attention_dropout > 0 and config.kernels.fused_attention
        ),
        "the teacher of a distillation runs between forward and loss": config.distillation.is_on,
        "attention with documents, prefixes, linear biases or soft-caps is planned on the host": (
            bounded or model.position_embedding_type == ALIBI or model.bidirectional
        ),
        "only torch's variable-length attention supports windows without planning on the host (torch 2.10, half "
        "precision, head sizes that are multiples of 8, 256 at most)": is_windowed and not flashes,
        "graphs of programs of --compile are not supported yet": config.kernels.compile,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def any_failed_on(mesh: ParallelMesh) -> Callable[[bool], bool]:
    """The `any_failed` of a `GraphCapturer` for the ranks of a mesh."""
    axes = [axis for axis in (mesh.tp, mesh.sp, mesh.ep) if axis.size > 1]

    def any_failed(failed: bool) -> bool:
        if not axes:
            return failed
        flag = torch.tensor(float(failed), device=mesh.device)
        for axis in axes:
            all_reduce_max(flag, axis)
        return bool(flag)

    return any_failed


class Outcome(NamedTuple):
    """The results of a micro-batch; if a graph computed them, its next replay overwrites them.

    Shapes: loss `[]`; sums as in `StepTotals`; gradients as the trained parameters, None if the loss does not depend on
    a parameter.
    """

    loss: torch.Tensor
    sums: torch.Tensor
    gradients: tuple[torch.Tensor | None, ...]


class _Graph(NamedTuple):
    inputs: DeviceBatch
    work: CapturedWork
    outcome: Outcome


class MicroBatchGraphs:
    """The graphs of a run, one for each shape of micro-batches.

    Args:
        parameters: of the network; frozen ones get no gradient.
        forward: computes scaled loss and sums of the objective of a micro-batch, from the batch's tensors only.
        capturer: captures on the device; all graphs share memory, as only one of them runs at a time.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        forward: Callable[[DeviceBatch], tuple[torch.Tensor, torch.Tensor]],
        capturer: GraphCapturer,
    ) -> None:
        self._parameters = list(parameters)
        self._forward = forward
        self._capturer = capturer
        self._graphs: dict[Hashable, _Graph] = {}
        self._warm_ups: Counter[Hashable] = Counter()
        self._settings: Hashable = None
        self._memory = capturer.new_memory()

    @property
    def count(self) -> int:
        return len(self._graphs)

    def run(self, batch: DeviceBatch, settings: Hashable) -> Outcome:
        """Runs forward, loss and backward of a micro-batch: as a graph, or without one during the warm-up of its shape.

        Args:
            settings: all inputs of the computation besides the batch's tensors and the set of trained parameters. A
                change releases all graphs.

        Raises:
            CaptureError: the micro-batch cannot be captured; it has not been computed.
        """
        settings = (settings, tuple(parameter.requires_grad for parameter in self._parameters))
        if settings != self._settings:
            self.release()
            self._settings = settings
        shape = batch_shape(batch)
        if shape not in self._graphs:
            if self._warm_ups[shape] < WARM_UP_MICRO_BATCHES:
                self._warm_ups[shape] += 1
                return self._capturer.warm_up(lambda: self._compute(batch))
            self._graphs[shape] = self._capture(batch)
        graph = self._graphs[shape]
        fill(graph.inputs, batch)
        graph.work.replay()
        return graph.outcome

    def set_gradients(self, outcome: Outcome, *, accumulates: bool) -> None:
        """Sets the gradients of the parameters to those of an outcome, see the function of the same name."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        set_gradients(list(zip(trained, outcome.gradients, strict=True)), accumulates=accumulates)

    def release(self) -> None:
        """Frees all graphs; each shape is warmed up and captured again when it next occurs."""
        for graph in self._graphs.values():
            graph.work.release()
        self._graphs.clear()
        self._warm_ups.clear()
        self._memory = self._capturer.new_memory()

    def _capture(self, batch: DeviceBatch) -> _Graph:
        while len(self._graphs) >= MOST_GRAPHS:
            oldest = next(iter(self._graphs))
            self._graphs.pop(oldest).work.release()
            self._warm_ups[oldest] = 0
        inputs = static_copy(batch)
        work, outcome = self._capturer.capture(lambda: self._compute(inputs), self._memory)
        return _Graph(inputs, work, outcome)

    def _compute(self, batch: DeviceBatch) -> Outcome:
        """Forward, loss and backward, without touching `.grad` or running hooks on it."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        loss, sums = self._forward(batch)
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        return Outcome(loss.detach(), sums, tuple(match_layout(*pair) for pair in zip(trained, gradients, strict=True)))


def warn_of_capture(failure: CaptureError) -> None:
    """Warns that a run continues without graphs."""
    log.warning(
        f"--cuda-graphs {AUTO}: a micro-batch could not be captured as a CUDA graph ({failure}). The run continues "
        f"without graphs, with the same results; --cuda-graphs {OFF} skips the attempt."
    )


def set_gradients(gradients: Sequence[tuple[nn.Parameter, torch.Tensor | None]], *, accumulates: bool) -> None:
    """Sets the gradients of parameters to a graph's buffers.

    Args:
        gradients: the buffer of each parameter; None if it has no gradient.
        accumulates: add to existing gradients, and copy others from the buffers, which the next replay overwrites.
    """
    totals, addends = [], []
    for parameter, gradient in gradients:
        if gradient is None:
            continue
        if parameter.grad is not None:
            totals.append(parameter.grad)
            addends.append(gradient)
        else:
            parameter.grad = gradient.clone() if accumulates else gradient
    if totals:
        torch._foreach_add_(totals, addends)


def match_layout(parameter: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a gradient in the memory layout of its parameter, as in `.grad`."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def static_copy(batch: DeviceBatch) -> DeviceBatch:
    """A copy of a micro-batch as the input buffers of a graph."""
    return dataclasses.replace(
        batch,
        inputs=tuple(map(torch.clone, batch.inputs)),
        passed=tuple(map(torch.clone, batch.passed)),
        targets=tuple(map(torch.clone, batch.targets)),
        first_sample=None,  # code that reads it would synchronize with the host, which fails a capture
    )


def fill(inputs: DeviceBatch, batch: DeviceBatch) -> None:
    """Copies a batch into the input buffers of a graph."""
    for buffer, tensor in zip(_tensors(inputs), _tensors(batch), strict=True):
        buffer.copy_(tensor)


def batch_shape(batch: DeviceBatch) -> Hashable:
    """The shapes and dtypes of a micro-batch, each of which needs its own graph."""
    return tuple((tensor.shape, tensor.dtype) for tensor in _tensors(batch))


def _tensors(batch: DeviceBatch) -> Sequence[torch.Tensor]:
    return (*batch.inputs, *batch.passed, *batch.targets)
