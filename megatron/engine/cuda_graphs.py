"""Forward, loss and backward of a micro-batch as one CUDA graph, which the host starts in one call.

Without a graph the host queues a thousand kernels a micro-batch, and a GPU that computes a small network waits for it.
A graph repeats kernels on the addresses they had when it was captured: inputs are copied to where it reads them, and
the loss, the sums of the objective and the gradients lie where it writes them.
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
WARM_UP_MICRO_BATCHES = 3  # of a shape, before its capture: libraries choose kernels and allocate workspaces
MOST_GRAPHS = 2  # each holds the gradients of all parameters


def graph_refusal(config: RunConfig, device_type: str, *, by_hooks: bool) -> str | None:
    """Why the micro-batches of a run are not captured as CUDA graphs; None if they are.

    A graph runs no code of the host: what the host decides in a micro-batch, or reads of it, would stay as it was when
    the graph was captured.

    Args:
        by_hooks: whether hooks of the backward pass take the gradients from the parameters.
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
        "gradients are averaged bucket by bucket within the backward pass (a reduce_bucket_size in --deepspeed_config "
        "of at least the parameters of a rank avoids it)": by_hooks and stage == 2,
        "each gradient is added within the backward pass (as bf16.immediate_grad_update of --deepspeed_config says)": (
            by_hooks
        ),
        "the host reads how many tokens an expert gets": model.num_experts > 1 and not model.drops_tokens,
        "keys and values travel in a ring between the parts of attention": parallel.ring_size > 1,
        f"messages of {parallel.distributed_backend} inside the blocks cannot be captured": (
            parallel.tensor_model_parallel_size * parallel.ulysses_size * parallel.expert_model_parallel_size > 1
            and parallel.distributed_backend != "nccl"
        ),
        "fused attention draws its dropout from a generator that is seeded for each call": (
            model.attention_dropout > 0 and config.kernels.fused_attention
        ),
        "the teacher of a distillation runs between forward and loss": config.distillation.is_on,
        "attention with documents, prefixes, linear biases or soft-caps is planned on the host": (
            bounded or model.position_embedding_type == ALIBI or model.bidirectional
        ),
        "only torch's variable-length attention has windows without a plan made on the host (torch 2.10, half "
        "precision, heads of a multiple of 8 channels, 256 at most)": is_windowed and not flashes,
        "programs of --compile have not been captured yet": config.kernels.compile,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def any_failed_on(mesh: ParallelMesh) -> Callable[[bool], bool]:
    """The `any_failed` of a `GraphCapturer` for graphs of the ranks of a mesh."""
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
    """What a micro-batch leaves; a graph's is overwritten by the next micro-batch.

    Shapes: loss `[]`; sums as those of `StepTotals`; gradients those of the trained parameters, None for parameters
    that the loss does not depend on.
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
        parameters: of the network; those that require no gradient get none.
        forward: computes the loss of a micro-batch, multiplied as it is to be for the backward pass, and the sums of
            the objective. It must read nothing of the batch but its tensors.
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
        self._met: Counter[Hashable] = Counter()
        self._settings: Hashable = None
        self._memory = capturer.new_memory()

    @property
    def count(self) -> int:
        return len(self._graphs)

    def run(self, batch: DeviceBatch, settings: Hashable) -> Outcome:
        """Forward, loss and backward of a micro-batch: as they are, or as a graph once its shape has been met often.

        Args:
            settings: what the computation depends on besides the tensors of the batch and which parameters are
                trained. If it changes, all graphs are released.

        Raises:
            CaptureError: the micro-batch cannot be captured; nothing of it has been computed.
        """
        settings = (settings, tuple(parameter.requires_grad for parameter in self._parameters))
        if settings != self._settings:
            self.release()
            self._settings = settings
        shape = batch_shape(batch)
        if shape not in self._graphs:
            if self._met[shape] < WARM_UP_MICRO_BATCHES:
                self._met[shape] += 1
                return self._capturer.warm_up(lambda: self._compute(batch))
            self._graphs[shape] = self._captured(batch)
        graph = self._graphs[shape]
        fill(graph.inputs, batch)
        graph.work.replay()
        return graph.outcome

    def give(self, outcome: Outcome, *, adds_up: bool) -> None:
        """Sets the gradients of the parameters to those of an outcome.

        Args:
            adds_up: add them to gradients that are there; those of a graph are copied from where its next run writes.
        """
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        give_gradients(list(zip(trained, outcome.gradients, strict=True)), adds_up=adds_up)

    def release(self) -> None:
        """Frees all graphs; shapes are warmed up and captured again when they are next met."""
        for graph in self._graphs.values():
            graph.work.release()
        self._graphs.clear()
        self._met.clear()
        self._memory = self._capturer.new_memory()

    def _captured(self, batch: DeviceBatch) -> _Graph:
        while len(self._graphs) >= MOST_GRAPHS:
            oldest = next(iter(self._graphs))
            self._graphs.pop(oldest).work.release()
            self._met[oldest] = 0
        inputs = static(batch)
        work, outcome = self._capturer.capture(lambda: self._compute(inputs), self._memory)
        return _Graph(inputs, work, outcome)

    def _compute(self, batch: DeviceBatch) -> Outcome:
        """Forward, loss and backward, which touches no `.grad` and runs none of the hooks that wait for one."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        loss, sums = self._forward(batch)
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        gradients = (match_layout(parameter, gradient) for parameter, gradient in zip(trained, found, strict=True))
        return Outcome(loss.detach(), sums, tuple(gradients))


def warn_of_capture(failure: CaptureError) -> None:
    """Says that a run goes on without graphs."""
    log.warning(
        f"--cuda-graphs {AUTO}: a micro-batch could not be captured as a CUDA graph ({failure}). The run goes on "
        f"without graphs, with the same results; --cuda-graphs {OFF} does not try."
    )


def give_gradients(gradients: Sequence[tuple[nn.Parameter, torch.Tensor | None]], *, adds_up: bool) -> None:
    """Sets the gradients of parameters.

    Args:
        gradients: for each parameter where a graph has written it; None if it has none.
        adds_up: add them to gradients that are there; others are copied from where the graph writes again.
    """
    totals, addends = [], []
    for parameter, gradient in gradients:
        if gradient is None:
            continue
        if parameter.grad is not None:
            totals.append(parameter.grad)
            addends.append(gradient)
        else:
            parameter.grad = gradient.clone() if adds_up else gradient
    if totals:
        torch._foreach_add_(totals, addends)


def match_layout(parameter: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient in the memory layout of its parameter, as a backward pass leaves it in `.grad`."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def static(batch: DeviceBatch) -> DeviceBatch:
    """A copy of a micro-batch from which a graph reads."""
    return dataclasses.replace(
        batch,
        inputs=tuple(map(torch.clone, batch.inputs)),
        passed=tuple(map(torch.clone, batch.passed)),
        targets=tuple(map(torch.clone, batch.targets)),
        first_sample=None,  # what asks for it would make the host wait, which a capture refuses
    )


def fill(inputs: DeviceBatch, batch: DeviceBatch) -> None:
    """Has the graph that reads the former compute on a batch of the same shape."""
    for place, tensor in zip(_tensors(inputs), _tensors(batch), strict=True):
        place.copy_(tensor)


def batch_shape(batch: DeviceBatch) -> Hashable:
    """What a graph for a micro-batch depends on of its tensors."""
    return tuple((tensor.shape, tensor.dtype) for tensor in _tensors(batch))


def _tensors(batch: DeviceBatch) -> Sequence[torch.Tensor]:
    return (*batch.inputs, *batch.passed, *batch.targets)
