"""Trains a combination on this rank, and compares the result with that of one process."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from campaigns.layouts.drawing import Case
from megatron.data.loader import Batch
from megatron.engine.replicas import find_differences
from megatron.engine.state import owned_pieces
from megatron.errors import ConfigError
from megatron.model.networks import network_layers
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import PieceKey
from megatron.parallel.tensor import weight_gradients
from megatron.train.start_up.engine_opening import build_engine, find_freezing
from tests.parity.layouts import local_batches

RUNNING = "running"  # the file with the seed of the case that is being trained


@dataclass(frozen=True)
class Outcome:
    """The results of a rank after the last step.

    Attributes:
        refusal: why nothing was trained; empty if it was.
        curve: loss and gradient norm of each step.
        pieces: weights, moments and averages that this rank writes to a checkpoint.
        differences: between copies that ranks hold of one value.
    """

    refusal: str = ""
    curve: tuple[tuple[float, float], ...] = ()
    pieces: tuple[tuple[PieceKey, np.ndarray], ...] = ()
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Distance:
    """The largest relative differences of a layout from one process; NaN where only one of both is a number.

    Attributes:
        tensor: of weights, moments and averages: the norm of the difference of a tensor by that of the tensor, or by
            a thousandth of the largest norm of its kind.
        worst: its name and kind.
    """

    loss: float
    first_norm: float
    norm: float
    tensor: float
    worst: str


def train(rank: int, cases: list[Case], folder: Path, is_alone: bool) -> list[Outcome]:
    """The outcomes of cases that take equally many ranks, those of ZeRO 3 last, since it changes torch.

    Raises:
        RuntimeError: a case failed other than by a refusal; names the case.
    """
    torch.set_num_threads(1)
    outcomes: dict[int, Outcome] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_gradients, "FEWEST_ADDED_CPU", 1)
        for case in sorted(cases, key=lambda each: " ".join(each.layout).rfind("--zero-stage 3") >= 0):
            if rank == 0:
                (folder / RUNNING).write_text(str(case.seed))
            try:
                outcomes[case.seed] = _outcome(case, is_alone)
            except ConfigError as refusal:
                outcomes[case.seed] = Outcome(str(refusal))
            except Exception as failure:
                raise RuntimeError(case.text) from failure
    return [outcomes[case.seed] for case in cases]


def _outcome(case: Case, is_alone: bool) -> Outcome:
    config = case.config(is_alone=is_alone)
    mesh = open_mesh(config.parallel)
    freezing = find_freezing(config.finetuning, config.loading, network_layers(config.model, mesh), mesh, None)
    engine = build_engine(config, mesh, freezing)
    curve = []
    for step in range(case.recipe.steps):
        batches = local_batches(case.recipe, config, mesh, step, True)
        if step == case.skipped_step:
            batches = _poisoned(batches, mesh)
        result = engine.train_batch(batches, case.recipe.learning_rate)
        curve.append((float(result.loss or 0), float(result.gradient_norm)))
    pieces = tuple((key, value.float().numpy().copy()) for key, value in owned_pieces(engine))
    return Outcome("", tuple(curve), pieces, tuple(find_differences(engine)))


def _poisoned(batches: list[Batch], mesh: ParallelMesh) -> list[Batch]:
    """The micro-batches of a rank, with a NaN in the last sample of the global batch."""
    if mesh.batch.rank < mesh.batch.size - 1:
        return batches
    mask = batches[-1].loss_mask.copy()
    mask[-1, 0] = math.nan
    return [*batches[:-1], dataclasses.replace(batches[-1], loss_mask=mask)]


def distance(outcomes: list[Outcome], alone: Outcome, *, with_weights: bool = True) -> Distance:
    """The distance of a layout's ranks from one process.

    Args:
        with_weights: whether weights, their masters and averages are compared, besides moments.

    Raises:
        ValueError: they hold other tensors, or parts of them twice or not at all.
    """
    found, expected = _whole(outcomes), _whole([alone])
    if found.keys() != expected.keys():
        raise ValueError(f"only one of both has {sorted(found.keys() ^ expected.keys())}")
    sizes = {place: float(np.linalg.norm(value)) for place, value in expected.items()}
    largest: dict[str, float] = {}
    for (_, kind), size in sizes.items():
        largest[kind] = max(size, largest.get(kind, 0.0))
    apart = {
        place: _relative(float(np.linalg.norm(found[place] - value)), max(sizes[place], 1e-3 * largest[place[1]]))
        for place, value in expected.items()
        if with_weights or place[1] not in ("weight", "master", "average")
    }
    worst = max(apart, key=lambda place: math.inf if math.isnan(apart[place]) else apart[place])
    curves = [outcome.curve for outcome in outcomes]
    losses = [_apart(one[0], two[0]) for curve in curves for one, two in zip(curve, alone.curve, strict=True)]
    norms = [[_apart(one[1], two[1]) for one, two in zip(curve, alone.curve, strict=True)] for curve in curves]
    return Distance(
        float(np.max(losses)),
        float(np.max([each[0] for each in norms])),
        float(np.max(norms)),
        apart[worst],
        str(worst),
    )


def _relative(difference: float, size: float) -> float:
    return 0.0 if difference == 0 else difference / size if size else math.inf


def _apart(one: float, two: float) -> float:
    """The relative difference; 0 of two that are not finite: the norm of a dropped step is infinite with ZeRO 3."""
    if not math.isfinite(one) and not math.isfinite(two):
        return 0.0
    return _relative(abs(one - two), abs(two))


def _whole(outcomes: list[Outcome]) -> dict[tuple[str, str], np.ndarray]:
    """The tensors that ranks hold parts of, by name and kind.

    Raises:
        ValueError: parts overlap or are missing.
    """
    tensors: dict[tuple[str, str], np.ndarray] = {}
    counts: dict[tuple[str, str], int] = {}
    for key, values in (piece for outcome in outcomes for piece in outcome.pieces):
        place = key.name, key.kind
        tensor = tensors.setdefault(place, np.full(key.shape, np.nan, np.float32))
        box = tensor[tuple(map(slice, key.start, key.stop))]
        flat = box.flatten()
        flat[key.first : key.last] = values
        box[...] = flat.reshape(box.shape)
        counts[place] = counts.get(place, 0) + key.numel
    wrong = [place for place, count in counts.items() if count != tensors[place].size]
    if wrong:
        raise ValueError(f"parts of {wrong} are missing or there twice")
    return tensors
