"""What comes later fits in: a foreign network, objective, sharded parameter and mesh axis, defined in this file alone.

They go through initial values, training, saving and loading in other layouts, and every layout trains like one process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.checkpoint import load, save
from megatron.config import RunConfig
from megatron.engine.ds_config import deepspeed_config
from megatron.engine.engine import Engine
from megatron.engine.optimizers.plans import plan_of
from megatron.engine.state import owned_pieces, pieces_to_load, refresh_weights
from megatron.model.interface.layer_cost import LayerCost
from megatron.model.interface.network import LayerKind, LayerSpec
from megatron.model.interface.step_context import StepContext, StepSettings
from megatron.objective.base import ObjectiveResult
from megatron.objective.metric import MetricSpec
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import AxisSize, ParallelMesh, build_mesh
from megatron.parallel.shard_spec import Dimension, ShardSpec, annotate, shard_spec_of
from megatron.parallel.tensor.collectives import copy_to, reduce_from
from megatron.parallel.tensor.norms import LayerNorm
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=2, steps=4, learning_rate=3.0e-3, clip=0.05)
SAVED_AFTER, WIDTH, EXPERTS, INNER, SEED = 2, 8, 4, 6, 77
BALANCE = 0.1  # weight of the auxiliary loss

# (pp, dp, row, tp), ZeRO stage; `row` is the axis that the product does not know
LAYOUTS = {
    "plain": ((1, 1, 1, 1), 0),
    "row2tp2": ((1, 1, 2, 2), 1),
    "row2-zero0": ((1, 1, 2, 1), 0),
    "row2dp2-zero2": ((1, 2, 2, 1), 2),
    "pp2row2": ((2, 1, 2, 1), 1),
    "row2dp2-zero3": ((1, 2, 2, 1), 3),
}


@dataclass(frozen=True)
class ToyBatch:
    """Vectors with a number each. Shapes: vectors `[b, s, h]`, numbers `[b, s]`, sample_ids `[b]`."""

    vectors: np.ndarray
    numbers: np.ndarray
    sample_ids: np.ndarray
    segment_ids: None = None


@dataclass(frozen=True)
class ToyObjective:
    """Least squares, with the number of near hits and the layers' own loss as statistics."""

    metrics: Mapping[str, MetricSpec] = dataclasses.field(default_factory=dict)
    statistics: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"hits": 1, "size": 1})

    def inputs(self, batch: ToyBatch) -> tuple[np.ndarray, ...]:
        return (batch.vectors,)

    def targets(self, batch: ToyBatch) -> Mapping[str, np.ndarray]:
        return {"numbers": batch.numbers}

    def token_count(self, batch: ToyBatch) -> float:
        return float(batch.numbers.size)

    def __call__(
        self, outputs: torch.Tensor, targets: Mapping[str, torch.Tensor], factor: torch.Tensor | None = None
    ) -> ObjectiveResult:
        error = outputs.squeeze(-1).float() - targets["numbers"]
        hits = (error.detach().abs() < 0.5).sum().reshape(1)
        return ObjectiveResult(error.square().sum(), torch.tensor(float(error.numel())), {"hits": hits})


class ToyInput(nn.Module):
    """A matrix of its own on every rank."""

    def __init__(self) -> None:
        super().__init__()
        spec = ShardSpec((Dimension("out", WIDTH), Dimension("in", WIDTH)), is_matrix=True, init_std=0.4)
        self.weight = annotate(nn.Parameter(torch.zeros(WIDTH, WIDTH)), spec)
        self.bias = annotate(nn.Parameter(torch.zeros(WIDTH)), ShardSpec.vector(WIDTH))

    def forward(self, vectors: torch.Tensor, context: StepContext) -> torch.Tensor:
        return F.linear(vectors, self.weight, self.bias)


class ToyExperts(nn.Module):
    """A sum of small networks: `[experts, inner, h]` split over the foreign axis and over tp; and a loss of its own."""

    def __init__(self, mesh: ParallelMesh, index: int) -> None:
        super().__init__()
        self.index, self.row, self.tp = index, mesh.axis("row"), mesh.tp
        experts, inner = Dimension("experts", EXPERTS, self.row), Dimension("inner", INNER, self.tp)
        into = ShardSpec((experts, inner, Dimension("hidden", WIDTH)), is_matrix=True, init_std=0.3)
        back = ShardSpec((experts, Dimension("hidden", WIDTH), inner), is_matrix=True, init_std=0.2)
        self.norm = LayerNorm(WIDTH, 1e-5)
        self.weight_in = annotate(nn.Parameter(torch.zeros(into.local_shape)), into)
        self.weight_out = annotate(nn.Parameter(torch.zeros(back.local_shape)), back)

    def forward(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        loss = BALANCE * hidden.square().mean()
        hidden = context.auxiliary.attach(hidden, "size", self.index, loss)
        x = copy_to(copy_to(self.norm(hidden), self.tp), self.row)
        inner = F.relu(torch.einsum("bsh,efh->besf", x, self.weight_in))
        y = torch.einsum("besf,ehf->bsh", inner, self.weight_out)
        return hidden + reduce_from(reduce_from(y, self.tp), self.row)


class ToyHead(nn.Module):
    """One number per vector."""

    def __init__(self) -> None:
        super().__init__()
        spec = ShardSpec((Dimension("out", 1), Dimension("in", WIDTH)), is_matrix=True, init_std=0.4)
        self.weight = annotate(nn.Parameter(torch.zeros(1, WIDTH)), spec)

    def forward(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        return F.linear(hidden, self.weight)


def toy_network(mesh: ParallelMesh) -> list[LayerSpec]:
    """Names say nothing: kinds and costs do."""
    cost = LayerCost(2 * EXPERTS * INNER * WIDTH)
    return [
        LayerSpec("entrance", LayerKind.EMBEDDING, LayerCost(WIDTH * WIDTH), ToyInput),
        LayerSpec("first", LayerKind.BLOCK, cost, partial(ToyExperts, mesh, 0)),
        LayerSpec("second", LayerKind.BLOCK, cost, partial(ToyExperts, mesh, 1)),
        LayerSpec("exit", LayerKind.HEAD, LayerCost(WIDTH), ToyHead),
    ]


def toy_engine(name: str) -> Engine:
    """The toy in one of the layouts."""
    (pp, dp, row, tp), stage = LAYOUTS[name]
    config: RunConfig = layout_config(RECIPE, (tp, pp, dp * row), stage, [])
    open_mesh(config.parallel)
    sizes = (
        AxisSize("pp", pp, "stage"),
        AxisSize("dp", dp, "batch"),
        AxisSize("row", row, "tensor"),
        AxisSize("tp", tp, "tensor"),
    )
    mesh = build_mesh(sizes, torch.device("cpu"), 0, timedelta(minutes=2))
    settings, steps = deepspeed_config(config), StepSettings(hidden_size=WIDTH)
    return Engine(toy_network(mesh), ToyObjective(), plan_of(config.optim), mesh, settings, steps, SEED)


def toy_batches(engine: Engine, step: int) -> list[ToyBatch]:
    """This rank's micro-batches of one global batch."""
    generator = np.random.default_rng(step)
    vectors = generator.standard_normal((RECIPE.global_batch_size, 5, WIDTH)).astype(np.float32)
    numbers = np.sin(vectors.sum(-1)).astype(np.float32)
    micro, batch = RECIPE.micro_batch_size, engine.mesh.batch
    firsts = range(batch.rank * micro, RECIPE.global_batch_size, micro * batch.size)
    return [ToyBatch(vectors[at : at + micro], numbers[at : at + micro], np.arange(at, at + micro)) for at in firsts]


def train(engine: Engine, first: int, last: int) -> list[tuple[float, ...]]:
    """Loss, gradient norm and metrics of the steps [first, last)."""
    curve = []
    for step in range(first, last):
        result = engine.train_batch(toy_batches(engine, step), RECIPE.learning_rate)
        curve.append((result.loss, result.gradient_norm, *result.sums["hits"], *result.sums["size"]))
    return curve


def train_and_save(rank: int, name: str, folder: str) -> list[tuple[float, ...]]:
    engine = toy_engine(name)
    curve = train(engine, 0, SAVED_AFTER)
    save(Path(folder), SAVED_AFTER, owned_pieces(engine), {"updates": engine.update_count}, engine.mesh)
    return curve + train(engine, SAVED_AFTER, RECIPE.steps)


def load_and_train(rank: int, name: str, folder: str) -> list[tuple[float, ...]]:
    engine = toy_engine(name)
    record = load(Path(folder) / f"iter_{SAVED_AFTER:07d}", pieces_to_load(engine), engine.mesh)
    refresh_weights(engine, record["updates"])
    return train(engine, SAVED_AFTER, RECIPE.steps)


def local_shapes(rank: int, name: str) -> dict[str, Any]:
    parameters = toy_engine(name).module.named_parameters()
    return {label: (tuple(p.shape), shard_spec_of(p).shape) for label, p in parameters if "weight_in" in label}


def world(name: str) -> int:
    pp, dp, row, tp = LAYOUTS[name][0]
    return pp * dp * row * tp


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[tuple[float, ...]]:
    """The curve of one process, which also leaves a checkpoint."""
    return run_ranks(train_and_save, 1, "plain", str(folder / "plain"))[0]


def check(curve: list[tuple[float, ...]], expected: list[tuple[float, ...]]) -> None:
    for step, known in zip(curve, expected, strict=True):
        assert step == pytest.approx(known, rel=2.0e-5)


def test_the_toy_learns_and_is_clipped(plain: list[tuple[float, ...]]) -> None:
    assert plain[-1][0] < plain[0][0]
    assert min(norm for _, norm, *_ in plain) > RECIPE.clip
    assert 0 < plain[-1][2] < RECIPE.global_batch_size * 5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "plain"])
def test_every_layout_trains_like_one_process_and_its_checkpoint_loads_elsewhere(
    name: str, plain: list[tuple[float, ...]], folder: Path
) -> None:
    for curve in run_ranks(train_and_save, world(name), name, str(folder / name)):
        check(curve, plain)
    check(run_ranks(load_and_train, 1, "plain", str(folder / name))[0], plain[SAVED_AFTER:])
    for curve in run_ranks(load_and_train, world(name), name, str(folder / "plain")):
        check(curve, plain[SAVED_AFTER:])


def test_the_parameter_is_split_over_the_extra_axis_and_over_tp() -> None:
    for shapes in run_ranks(local_shapes, 4, "row2tp2"):
        assert set(shapes.values()) == {((EXPERTS // 2, INNER // 2, WIDTH), (EXPERTS, INNER, WIDTH))}
