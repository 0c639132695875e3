"""The loss of each source: right in every layout, and without any influence on the training."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron.data.loader import Batch
from megatron.objective.language_model import SOURCE_LOSSES
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, layout_name, local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=2, steps=3)
SOURCES = ("web", "books", "code", "nothing")  # the last one has no samples


def with_sources(batches: list[Batch]) -> list[Batch]:
    """Says of every sample that it is of source 0, 1 or 2, whatever rank has it."""
    return [dataclasses.replace(batch, source_ids=batch.sample_ids % 3) for batch in batches]


def of_source(batches: list[Batch], number: int) -> list[Batch]:
    """The same batches where only the tokens of one source count."""
    masks = [batch.loss_mask * (batch.sample_ids % 3 == number)[:, None] for batch in batches]
    return [
        dataclasses.replace(batch, loss_mask=np.ascontiguousarray(mask, np.float32))
        for batch, mask in zip(batches, masks, strict=True)
    ]


def train_twice(rank: int, layout: tuple[int, int, int]):
    """Curves without and with sources, the losses that were noted, and those that evaluating one source gives."""
    config = layout_config(RECIPE, layout, 1, [])
    mesh = open_mesh(config.parallel)
    plain, noting = build_engine(config, mesh), build_engine(config, mesh)
    noting.objective = dataclasses.replace(noting.objective, sources=SOURCES)
    curves, noted, expected = [], [], []
    for step in range(RECIPE.steps):
        batches = local_batches(RECIPE, config, mesh, step, uneven=True)
        expected.append([plain.evaluate(of_source(batches, number)) for number in range(3)])
        results = [plain.train_batch(batches, RECIPE.learning_rate)]
        results.append(noting.train_batch(with_sources(batches), RECIPE.learning_rate))
        curves.append([(result.loss, result.gradient_norm) for result in results])
        assert results[0].metrics == {}
        sums = results[1].sums[SOURCE_LOSSES]
        noted.append(list(zip(sums[: len(SOURCES)], sums[len(SOURCES) :], strict=True)))
    return curves, noted, expected


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1), (1, 2, 2)], ids=layout_name)
def test_the_loss_of_each_source(layout):
    tp, pp, dp = layout
    for curves, noted, expected in run_ranks(train_twice, tp * pp * dp, layout):
        for without, with_noting in curves:
            assert without == with_noting
        for (loss, _), step, true_step in zip((pair[0] for pair in curves), noted, expected, strict=True):
            assert [tokens for _, tokens in step] == [*(tokens for _, tokens in true_step), 0]
            assert [total for total, _ in step[:3]] == pytest.approx([total for total, _ in true_step], rel=1e-5)
            assert sum(total for total, _ in step) / sum(tokens for _, tokens in step) == pytest.approx(loss, rel=1e-5)
