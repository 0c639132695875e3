"""Weights, masters and moments change in the optimizer's update only, after the work that is registered for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from megatron.engine.state import owned_bytes, owned_pieces
from megatron.parallel.joining import open_mesh
from megatron.parallel.pieces import PieceKey
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=2, steps=2)
Case = tuple[tuple[int, int, int], int, Sequence[str]]


def contents(pieces: Sequence[tuple[PieceKey, torch.Tensor]]) -> list[bytes]:
    return [tensor.numpy().tobytes() for _, tensor in pieces]


def changes(rank: int, cases: Sequence[Case]) -> list[tuple[int, bool, bool, bool]]:
    """For each case: calls of the hook; whether the first saw the old state, the step changed it, its size is known."""
    results = []
    for layout, stage, flags in cases:
        config = layout_config(RECIPE, layout, stage, list(flags))
        mesh = open_mesh(config.parallel)
        engine = build_engine(config, mesh)
        size_bytes = owned_bytes(engine)
        engine.train_batch(local_batches(RECIPE, config, mesh, 0, False), 1e-3)
        pieces, seen = list(owned_pieces(engine)), []
        before = contents(pieces)
        engine.before_update(lambda seen=seen, pieces=pieces: seen.append(contents(pieces)))
        engine.train_batch(local_batches(RECIPE, config, mesh, 1, False), 1e-3)
        after = contents(pieces)
        is_changed = all(new != old for new, old in zip(after, before, strict=True))
        results.append((len(seen), seen[0] == before, is_changed, size_bytes == sum(map(len, after))))
        torch.distributed.barrier()
    return results


BF16 = ("--bf16",)
SGD = ("--optimizer", "sgd", "--sgd-momentum", "0.9")


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (1, [((1, 1, 1), 0, ()), ((1, 1, 1), 0, BF16), ((1, 1, 1), 3, ()), ((1, 1, 1), 0, SGD)]),
        (
            2,
            [
                ((1, 2, 1), 0, ()),
                ((1, 2, 1), 1, ("--bf16",)),
                *(((1, 1, 2), stage, ("--bf16",)) for stage in (1, 2, 3)),
            ],
        ),
    ],
)
def test_nothing_that_is_saved_changes_before_the_update(world_size: int, cases: list[Case]) -> None:
    for results in run_ranks(changes, world_size, cases):
        for case, (calls, saw_old, changed, size_is_known) in zip(cases, results, strict=True):
            assert calls >= 1 and saw_old and changed and size_is_known, case


def exchanges(rank: int, cases: Sequence[Sequence[str]]) -> list[bool]:
    """For each case, whether work registered for the update saw the weights before the means took their place."""
    results = []
    for flags in cases:
        config = layout_config(RECIPE, (1, 1, 1), 0, list(flags))
        mesh = open_mesh(config.parallel)
        engine = build_engine(config, mesh)
        engine.train_batch(local_batches(RECIPE, config, mesh, 0, False), 1e-3)
        pieces, seen = list(owned_pieces(engine)), []
        before = contents(pieces)
        engine.before_update(lambda seen=seen, pieces=pieces: seen.append(contents(pieces)))
        with engine.using_averages():
            results.append(seen == [before])
    return results


def test_nothing_that_is_saved_changes_before_the_means_take_the_place_of_the_weights() -> None:
    """A save that began before a dropped update may still be reading the weights."""
    cases = [("--ema-decay", "0.9"), ("--optimizer", "schedule-free")]
    assert run_ranks(exchanges, 1, cases)[0] == [True, True]
