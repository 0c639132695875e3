"""torch.distributed.pipelining, which shares no code with the executor, trains the same chunks to the same weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from megatron.config import RunConfig
from megatron.engine.pipeline.chunks import Chunks
from megatron.engine.stage_build import tied_weights
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import StepSettings
from megatron.model.networks import network_layers
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.schedule.building import build_schedule
from megatron.parallel.shard_spec import shard_spec_of
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=5, hidden_size=16, steps=3, learning_rate=2.0e-3, clip=0.2)
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
TORCH_SCHEDULES = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "interleaved-zb": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}
STAGES = 2
# tp, pp and dp, the ZeRO stage of the engine, and schedules; torch's own optimizer is never divided.
CASES = [((1, STAGES, 1), 0, tuple(TORCH_SCHEDULES)), ((1, STAGES, 2), 1, ("interleaved-zb", "zbv"))]
LOSS_RATIO, NORM_RATIO = 4.0e-7, 1.0e-6

Curve = list[tuple[float, float]]


class TorchStage(nn.Module):
    """The layers of a chunk, registered here with every weight that they use: torch computes weight gradients for those
    of the module alone, and would leave a tied weight of another chunk without a word.
    """

    def __init__(self, layers: list[nn.Module], settings: StepSettings) -> None:
        super().__init__()
        self.layers, self.settings = nn.ModuleList(layers), settings

    def forward(self, hidden: torch.Tensor, sample_ids: torch.Tensor) -> torch.Tensor:
        context = self.settings.context(sample_ids)
        for layer in self.layers:
            hidden = layer(hidden, context)
        return hidden.clone()  # torch detaches it in place, and a block returns a view


class TorchPipeline:
    """A network trained by torch's schedule and optimizer."""

    def __init__(self, config: RunConfig, mesh: ParallelMesh, name: str) -> None:
        placement = build_schedule(name, STAGES, 2, 1).placement
        network = network_layers(config.model, mesh)
        chunks = Chunks.of(network, placement, mesh.pp.rank)
        self.mesh, self.clip, self.has_last = mesh, config.optim.clip_grad, chunks.has_last
        self.stack = LayerStack(chunks.specs, seed=config.random.seed)
        self.tied = tied_weights(network, self.stack, mesh)
        settings = StepSettings(seed=config.random.seed, hidden_size=RECIPE.hidden_size)
        layers = [layer for _, layer in self.stack.named_layers()]
        size = RECIPE.micro_batch_size, RECIPE.sequence_length
        hidden = torch.empty(*size, RECIPE.hidden_size, requires_grad=True)
        logits = torch.empty(*size, config.model.padded_vocab_size, requires_grad=True)
        tokens = torch.empty(size, dtype=torch.int64)
        stages = [
            PipelineStage(
                TorchStage([layers[place] for place in places], settings),
                chunk,
                placement.chunks,
                torch.device("cpu"),
                input_args=hidden if chunk else tokens,
                output_args=logits if chunks.is_last(chunk) else hidden,
                group=mesh.pp.group,
            )
            for chunk, places in chunks.layers.items()
        ]
        micro_batches = RECIPE.global_batch_size // (RECIPE.micro_batch_size * mesh.dp.size)
        self.schedule: Any = TORCH_SCHEDULES[name](stages, micro_batches, loss_fn=self.loss, scale_grads=False)
        self.parameters = list(self.stack.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [each for each in self.parameters if each.dim() > 1], "weight_decay": RECIPE.weight_decay},
                {"params": [each for each in self.parameters if each.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=RECIPE.learning_rate,
        )
        self.tokens_in_batch = 1.0

    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Labels and mask are the two planes of the target. Shapes: logits `[b, s, v]`, target `[b, s, 2]`."""
        losses = F.cross_entropy(logits.transpose(1, 2)[:, : RECIPE.vocab_size], target[..., 0], reduction="none")
        return (losses * target[..., 1]).sum() / self.tokens_in_batch

    def step(self, batches: list[Any]) -> tuple[float, float]:
        """The loss and the gradient norm of a global batch."""
        labels, masks, tokens, ids = (
            torch.cat([torch.from_numpy(getattr(batch, name)) for batch in batches])
            for name in ("labels", "loss_mask", "tokens", "sample_ids")
        )
        counted = masks.sum()
        dist.all_reduce(counted, group=self.mesh.dp.group)
        self.tokens_in_batch = float(counted)
        found: list[torch.Tensor] = []
        inputs = [tokens] if self.mesh.pp.rank == 0 else []
        given = {"target": torch.stack([labels, masks.long()], -1), "losses": found} if self.has_last else {}
        self.optimizer.zero_grad()
        self.schedule.step(*inputs, sample_ids=ids, **given)
        for each in self.parameters:
            dist.all_reduce(each.grad, group=self.mesh.dp.group)
        for weight, axis in self.tied:
            dist.all_reduce(weight.grad, group=axis.group)
        squares = [each.grad.square().sum() for each in self.parameters if shard_spec_of(each).is_counted(self.mesh)]
        loss, square = torch.stack([torch.zeros(()), *found]).sum(), torch.stack(squares).sum()
        figures = torch.stack([loss.detach(), square / self.mesh.dp.size])  # every replica has the same gradients
        dist.all_reduce(figures)
        norm = float(figures[1].sqrt())
        for each in self.parameters:
            each.grad.mul_(min(1.0, self.clip / (norm + 1e-6)))
        self.optimizer.step()
        return float(figures[0]), norm


def curves_of_both(
    rank: int, layout: tuple[int, int, int], zero_stage: int, names: tuple[str, ...]
) -> dict[str, tuple[Curve, Curve]]:
    """For each schedule the losses and norms of the engine, and those of torch."""
    mesh: Any = None
    curves = {}
    for name in names:
        config = layout_config(RECIPE, layout, zero_stage, [*DROPOUT, "--pipeline-schedule", name])
        mesh = mesh or open_mesh(config.parallel)
        engine, torchs = build_engine(config, mesh), TorchPipeline(config, mesh, name)
        found: tuple[Curve, Curve] = [], []
        for step in range(RECIPE.steps):
            batches = local_batches(RECIPE, config, mesh, step, True)
            result = engine.train_batch(batches, RECIPE.learning_rate)
            found[0].append((result.loss, result.gradient_norm))
            found[1].append(torchs.step(batches))
        curves[name] = found
    return curves


@pytest.mark.full
@pytest.mark.parametrize(("layout", "zero_stage", "names"), CASES, ids=["pp2", "pp2-dp2"])
def test_a_schedule_equals_the_one_of_torch(
    layout: tuple[int, int, int], zero_stage: int, names: tuple[str, ...]
) -> None:
    for curves in run_ranks(curves_of_both, STAGES * layout[2], layout, zero_stage, names):
        assert set(curves) == set(names)
        for name, (engine, torchs) in curves.items():
            assert min(norm for _, norm in torchs) > RECIPE.clip, "clipping must be active"
            assert [loss for loss, _ in engine] == pytest.approx([loss for loss, _ in torchs], rel=LOSS_RATIO), name
            assert [norm for _, norm in engine] == pytest.approx([norm for _, norm in torchs], rel=NORM_RATIO), name
