"""Training steps: one `Engine` over DeepSpeed's plain and pipeline engines.

Whatever the layout, the loss is the sum of the token losses of the global batch over the number of its counted tokens.
DeepSpeed averages over micro-batches and replicas, so every token is weighted with
(micro-batches * replicas / counted tokens) first.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import nn

from megatron import log
from megatron.config import ModelConfig, OptimConfig, PrecisionConfig
from megatron.data.loader import Batch
from megatron.engine.objective import LanguageModelObjective
from megatron.engine.pipeline import MeshUnit, StagedModule
from megatron.errors import ConfigError
from megatron.model.gpt import build_dense, gpt_layers
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_sum

# Gradients are reduced before they are clipped at this value when the user wants no clipping; DeepSpeed computes no
# norm at 0.
_NO_CLIPPING = 1.0e30

# Attributes of DeepSpeed's dynamic loss scaler that change from step to step.
_SCALER_COUNTERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

# What DeepSpeed's use of torch makes torch say on every step of some layouts: the stages of a pipeline exchange
# activations inside a backward pass (gradients cross stages explicitly, so nothing is lost; tests/parity holds that),
# and renamed functions.
_HARMLESS_WARNINGS = (
    r"c10d::broadcast_: an autograd kernel was not registered",
    r"`torch\.distributed\.all_gather_into_tensor` is deprecated",
    r"`torch\.distributed\.reduce_scatter_tensor` is deprecated",
)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; equal on all ranks.

    Attributes:
        loss: mean loss per counted token of the global batch, in nats.
        gradient_norm: global 2-norm of the gradient before clipping.
        sample_count: samples of the global batch.
        token_count: tokens that counted in the loss.
        skipped: the update was dropped because a half-precision gradient overflowed.
        loss_scale: factor that was applied to the loss (1 outside fp16).
        source_losses: (sum of the token losses, counted tokens) of each source; empty unless batches name sources.
    """

    loss: float
    gradient_norm: float
    sample_count: int
    token_count: int
    skipped: bool
    loss_scale: float
    source_losses: tuple[tuple[float, int], ...] = ()


class Engine:
    """Forward, backward, reduce, clip and update for one layout.

    Args:
        model: the resolved architecture.
        precision: the dtype and the loss scale.
        optim: the resolved optimizer section.
        mesh: the open mesh.
        settings: what DeepSpeed is told, see `ds_config.deepspeed_config`.
        layer_settings: keyword arguments of `gpt_layers`.
    """

    def __init__(
        self,
        model: ModelConfig,
        precision: PrecisionConfig,
        optim: OptimConfig,
        mesh: ParallelMesh,
        settings: Mapping[str, Any],
        layer_settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.precision = precision
        self.optim = optim
        self.mesh = mesh
        self.zero_stage = int(settings["zero_optimization"]["stage"])
        join_deepspeed()
        self.objective = LanguageModelObjective(mesh, model.vocab_size)
        self.module = build_module(model, mesh, layer_settings or {}, self.objective)
        if precision.dtype_name != "float32":
            self.module.to(getattr(torch, precision.dtype_name))
        self.deepspeed = _initialize(settings, optim, mesh, self.module)
        self._last_norm = 0.0
        if self.zero_stage == 0:
            self.deepspeed.clip_fp32_gradients = self._clip_gradients

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer at the bottom, whatever DeepSpeed wrapped around it."""
        return self.deepspeed.basic_optimizer

    @property
    def is_pipelined(self) -> bool:
        """Whether several stages take part."""
        return self.mesh.pp.size > 1

    @property
    def update_count(self) -> int:
        """Updates the optimizer has made; Adam's bias correction depends on it."""
        return max((int(state["step"]) for state in self.optimizer.state.values() if "step" in state), default=0)

    def counted_parameters(self) -> Iterator[tuple[str, int]]:
        """Name and local elements of every parameter this rank accounts for.

        Summed over tp and pp they are the network.
        """
        for parameter in self.module.parameters():
            if counts_here(parameter, self.mesh):
                yield parameter.global_name, getattr(parameter, "ds_numel", parameter.numel())  # type: ignore[attr-defined]

    @property
    def loss_scale_state(self) -> dict[str, float]:
        """The dynamic loss scaler's counters, for a checkpoint; empty outside fp16."""
        scaler = getattr(self.deepspeed.optimizer, "loss_scaler", None)
        if not self.precision.fp16 or scaler is None:
            return {}
        return {name: getattr(scaler, name) for name in _SCALER_COUNTERS if hasattr(scaler, name)}

    def restore_loss_scale(self, state: Mapping[str, float]) -> None:
        """Goes on with stored counters, so that a resume does not search for the scale (and skip steps) again."""
        scaler = getattr(self.deepspeed.optimizer, "loss_scaler", None)
        if self.precision.fp16 and self.precision.loss_scale is None and scaler is not None:
            for name, value in state.items():
                setattr(scaler, name, value)

    def train_batch(self, micro_batches: Iterable[Batch], learning_rate: float) -> StepResult:
        """Trains one global batch.

        Args:
            micro_batches: this rank's micro-batches of the global batch, equally many on every rank.
            learning_rate: the rate of this step.
        """
        batches = list(micro_batches)
        samples = len(batches) * self.optim.micro_batch_size * self.mesh.dp.size
        if samples != self.deepspeed.train_batch_size():
            self.deepspeed.set_train_batch_size(samples)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        token_count, inputs = self._prepare(batches)
        if self.is_pipelined:
            loss = float(self.deepspeed.train_batch(data_iter=iter(inputs)))
        else:
            loss = self._train_plain(inputs)
        skipped = not self.deepspeed.was_step_applied()
        sources = self.objective.source_losses(batches, token_count)
        return StepResult(loss, self._gradient_norm(), samples, token_count, skipped, self._loss_scale(), sources)

    def evaluate(self, micro_batches: Iterable[Batch]) -> tuple[float, int]:
        """Returns (sum of the token losses, counted tokens) of one global batch, equal on all ranks; trains nothing."""
        batches = list(micro_batches)
        token_count, inputs = self._prepare(batches)
        if self.is_pipelined:
            mean = float(self.deepspeed.eval_batch(iter(inputs), num_micro_batches=len(inputs)))
            self.module.train()
        else:
            self.module.eval()
            with torch.no_grad():
                losses = torch.stack([self._plain_loss(*entry) for entry in inputs])
                mean = self._mean_over_replicas(losses.mean())
            self.module.train()
        return mean * token_count, token_count

    def _prepare(self, batches: Sequence[Batch]) -> tuple[int, list[tuple[Any, Any]]]:
        """Moves the micro-batches to the device and weights their tokens.

        Shapes: tokens, labels, weights [b, s]; sample ids [b].
        """
        counted = torch.tensor([sum(float(batch.loss_mask.sum()) for batch in batches)], dtype=torch.float64)
        total = float(all_reduce_sum(counted.to(self.mesh.device), self.mesh.dp))
        scale = len(batches) * self.mesh.dp.size / max(total, 1.0)
        return round(total), [self._to_device(batch, scale) for batch in batches]

    def _to_device(self, batch: Batch, scale: float) -> tuple[Any, Any]:
        def move(array: Any) -> torch.Tensor:
            return torch.from_numpy(array).to(self.mesh.device, non_blocking=True)

        inputs = [move(batch.tokens), move(batch.sample_ids)]
        if batch.segment_ids is not None:
            inputs.append(move(batch.segment_ids))
        targets = [move(batch.labels), move(batch.loss_mask) * scale]
        if batch.source_ids is not None:
            targets.append(move(batch.source_ids))
        return tuple(inputs), tuple(targets)

    def _train_plain(self, inputs: Sequence[tuple[Any, Any]]) -> float:
        total = torch.zeros((), device=self.mesh.device)
        self.module.train()
        for number, entry in enumerate(inputs, start=1):
            # DeepSpeed's own count of micro-batches is off after the batch size has changed.
            self.deepspeed.set_gradient_accumulation_boundary(number == len(inputs))
            loss = self._plain_loss(*entry)
            self.deepspeed.backward(loss)
            self.deepspeed.step()
            total += loss.detach()
        return self._mean_over_replicas(total / len(inputs))

    def _plain_loss(self, inputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.objective(self.deepspeed(*inputs), targets)

    def _mean_over_replicas(self, value: torch.Tensor) -> float:
        return float(all_reduce_sum(value.detach(), self.mesh.dp)) / self.mesh.dp.size

    def _gradient_norm(self) -> float:
        if self.zero_stage == 0:
            return self._last_norm
        norm = self.deepspeed.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def _loss_scale(self) -> float:
        return float(self.deepspeed.optimizer.cur_scale) if self.precision.fp16 else 1.0

    def _clip_gradients(self) -> None:
        """Clips by the true global norm, in place of DeepSpeed's stage-0 clipping.

        DeepSpeed's own counts the tied weight on both stages and leaves out replicated parameters of later stages.
        """
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for parameter in self.module.parameters():
            if parameter.grad is not None and counts_here(parameter, self.mesh):
                square += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) ** 2
        square = all_reduce_sum(all_reduce_sum(square, self.mesh.tp), self.mesh.pp)
        self._last_norm = math.sqrt(float(square))
        limit = self.optim.clip_grad
        if limit > 0.0 and self._last_norm > limit:
            torch._foreach_mul_(gradients, limit / (self._last_norm + 1.0e-6))


def join_deepspeed() -> None:
    """Lets DeepSpeed use the process groups that the mesh opened; doing it twice changes nothing."""
    # On CPU deepspeed would compile its shared-memory collectives here (half a minute, and a failure without a
    # compiler).
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for text in _HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    with _quiet():
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def counts_here(parameter: nn.Parameter, mesh: ParallelMesh) -> bool:
    """Whether this rank is the one that accounts for a parameter among its tensor- and pipeline-parallel copies."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return mesh.tp.rank == 0 or bool(getattr(parameter, "tensor_model_parallel", False))


def build_module(
    model: ModelConfig, mesh: ParallelMesh, layer_settings: Mapping[str, Any], objective: LanguageModelObjective
) -> nn.Module:
    """Builds this rank's part of the network: one stage of a pipeline, or the whole as one module."""
    if mesh.pp.size == 1:
        return build_dense(model, mesh, **layer_settings)
    with _quiet():
        return StagedModule(gpt_layers(model, mesh, **layer_settings), mesh, objective)


def build_optimizer(optim: OptimConfig, module: nn.Module) -> torch.optim.Optimizer:
    """Builds the torch optimizer with two groups: matrices decay, biases and norms do not.

    Raises:
        ConfigError: the optimizer is not one of ours, or this stage lacks one of the groups.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    if not all(group["params"] for group in groups):
        raise ConfigError(
            "a pipeline stage holds no matrix or no bias/norm parameter, so its optimizer groups would differ from the "
            "other stages'. Give every stage at least one transformer layer (--pipeline-model-parallel-size, "
            "--pp-partition-method)."
        )
    rate = optim.lr or 0.0
    if optim.optimizer == "adam":
        betas = (optim.adam_beta1, optim.adam_beta2)
        return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=optim.adam_eps, fused=True)
    if optim.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=optim.sgd_momentum)
    raise ConfigError(f"--optimizer {optim.optimizer} is not known. Use adam or sgd.")


def _initialize(settings: Mapping[str, Any], optim: OptimConfig, mesh: ParallelMesh, module: nn.Module) -> Any:
    settings = dict(settings)
    stage = settings["zero_optimization"]["stage"]
    if stage == 0 and not settings["gradient_clipping"]:
        settings["gradient_clipping"] = _NO_CLIPPING
    with _quiet():
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=build_optimizer(optim, module),
            config=settings,
            mpu=None if mesh.pp.size > 1 else MeshUnit(mesh),
            dist_init_required=False,
        )
    log.info(
        f"DeepSpeed info: version={deepspeed.__version__}, engine={type(engine).__name__}, "
        f"optimizer={type(engine.optimizer).__name__}, ZeRO stage={stage}"
    )
    return engine


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps DeepSpeed's set-up chatter off standard output, where only results go."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level if level > logging.WARNING else logging.WARNING)
