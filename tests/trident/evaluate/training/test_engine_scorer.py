"""Scores of the network in training: equal in every layout, and without effect on training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config import RunConfig
from megatron.engine.engine import Engine
from megatron.errors import DataError
from megatron.objective.base import sum_sizes
from megatron.objective.scoring import ScoringObjective
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh, standard_axes
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.networks import build_gpt, forward
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe
from tests.train.samples import model_config
from trident.evaluate.scoring import Query, Score
from trident.evaluate.training.engine_scorer import EngineScorer

RECIPE = dataclasses.replace(Recipe(), num_layers=2, hidden_size=16, steps=3)

CAPACITY = (
    "--num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax --moe-expert-capacity-factor 0.5 --moe-min-capacity 0"
)


def some_queries() -> list[Query]:
    """Queries of all lengths that fit, in no order."""
    draws = np.random.default_rng(3)
    lengths = [RECIPE.sequence_length + 1, 2, *draws.integers(2, RECIPE.sequence_length + 2, 29).tolist()]
    return [
        Query(tuple(draws.integers(0, RECIPE.vocab_size, length).tolist()), int(draws.integers(1, length)))
        for length in lengths
    ]


def train_and_score(rank: int, cases: Sequence[tuple[tuple[int, int, int], int]]) -> dict[str, Any]:
    """By layout and ZeRO stage: the scores before each step, and the curves of runs with and without scoring."""
    found = {}
    for layout, stage in cases:
        config = layout_config(RECIPE, layout, stage, [])
        mesh = open_mesh(config.parallel)
        asked, curve = train(build_engine(config, mesh), config, scores=True)
        found[f"{layout} ZeRO-{stage}"] = asked, curve, train(build_engine(config, mesh), config, scores=False)[1]
    return found


def train(engine: Engine, config: RunConfig, *, scores: bool) -> tuple[list[list[Score]], list[tuple[float, float]]]:
    asked, curve = [], []
    scorer = EngineScorer(engine, config.model, config.optim.micro_batch_size * RECIPE.sequence_length)
    for step in range(RECIPE.steps):
        if scores:
            asked.append(scorer.score(some_queries()))
        result = engine.train_batch(local_batches(RECIPE, config, engine.mesh, step, True), RECIPE.learning_rate)
        curve.append((result.loss, result.gradient_norm))
    return asked, curve


def score_in_one_process(rank: int) -> tuple[Any, list[Score], list[Score]]:
    """The results of one process; and, of experts with a capacity, the scores of queries together and one by one."""
    found = train_and_score(rank, [((1, 1, 1), 0)])["(1, 1, 1) ZeRO-0"]
    config = layout_config(RECIPE, (1, 1, 1), 0, CAPACITY.split())
    scorer = EngineScorer(build_engine(config, open_mesh(config.parallel)), config.model, 4 * RECIPE.sequence_length)
    return found, scorer.score(some_queries()), [scorer.score([query])[0] for query in some_queries()]


@pytest.fixture(scope="module")
def one_process() -> tuple[Any, list[Score], list[Score]]:
    return run_ranks(score_in_one_process, 1)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def single(one_process: tuple[Any, list[Score], list[Score]]) -> Any:
    return one_process[0]


def test_with_a_capacity_no_score_depends_on_other_queries(one_process: tuple[Any, list[Score], list[Score]]) -> None:
    _, together, alone = one_process
    assert [one.predicted for one in together] == [one.predicted for one in alone]
    np.testing.assert_allclose([one.logprob for one in together], [one.logprob for one in alone], rtol=2e-5)


def test_scores_are_log_probabilities_of_the_targets(single: Any) -> None:
    model = build_gpt(layout_config(RECIPE, (1, 1, 1), 0, []).model).eval()
    before_training, after_a_step, _ = single[0]
    for query, score, later in zip(some_queries(), before_training, after_a_step, strict=True):
        text, first = torch.tensor([query.tokens]), query.first_target
        with torch.no_grad():
            logits = forward(model, text[:, :-1], torch.tensor([0]))[0, first - 1 :, : RECIPE.vocab_size]
        logprobs = logits.log_softmax(-1).gather(1, text[0, first:, None])
        assert score.logprob == pytest.approx(float(logprobs.sum()), rel=1e-5)
        assert list(score.predicted) == logits.argmax(-1).tolist()
        assert score.tokens == len(query.targets) and later.logprob != score.logprob


@pytest.mark.full
def test_every_layout_and_zero_stage_gives_the_same_scores_and_trains_on(single: Any) -> None:
    expected, curve, undisturbed = single
    assert curve == undisturbed
    cases = [((2, 1, 2), 1), ((2, 1, 2), 2), ((1, 1, 4), 3), ((1, 2, 2), 0), ((1, 2, 2), 1)]
    first, *others = run_ranks(train_and_score, 4, cases)
    assert all(other == first for other in others), "every rank has the same result"
    for name, (asked, curve, undisturbed) in first.items():
        assert curve == undisturbed, name
        for answers, truth in zip(asked, expected, strict=True):
            assert [one.predicted for one in answers] == [one.predicted for one in truth], name
            logprobs = [one.logprob for one in answers]
            np.testing.assert_allclose(logprobs, [one.logprob for one in truth], rtol=2e-5, err_msg=name)


class RecordingEngine:
    """An engine of two pipeline stages and two replicas that records shapes and returns no scores."""

    def __init__(self) -> None:
        self.mesh = ParallelMesh.at(standard_axes(4, pp=2), 0)
        self.shapes: list[list[tuple[int, ...]]] = []

    def measure(self, micro_batches: Sequence[Any], objective: ScoringObjective) -> dict[str, torch.Tensor]:
        self.shapes.append([batch.tokens.shape for batch in micro_batches])
        assert all(batch.segment_ids.shape == batch.prefix_mask.shape == batch.tokens.shape for batch in micro_batches)
        return {name: torch.zeros(size) for name, size in sum_sizes(objective).items()}


def test_the_micro_batches_of_a_call_have_one_shape_within_the_budget() -> None:
    engine, told, beats = RecordingEngine(), [], []
    model = model_config(vocab_size=RECIPE.vocab_size, padded_vocab_size=256)
    scorer = EngineScorer(engine, model, 100, beat=lambda: beats.append(True))  # type: ignore[arg-type]
    scores = scorer.score(some_queries(), lambda *progress: told.append(progress))
    assert len(scores) == 31 and told[-1] == (31, 31)
    assert len(beats) == len(told) == len(engine.shapes)
    for shapes in engine.shapes:
        assert len(set(shapes)) == 1 and shapes[0][0] * shapes[0][1] <= 100 and len(shapes) <= 8


def test_a_query_longer_than_the_network_is_refused() -> None:
    scorer = EngineScorer(RecordingEngine(), model_config(), 100)  # type: ignore[arg-type]
    assert scorer.max_length == 37
    with pytest.raises(DataError, match="query 0 has 38 tokens"):
        scorer.score([Query((1,) * 38, 1)])
    with pytest.raises(DataError, match="query 0 has the token 90"):
        scorer.score([Query((1, 90), 1)])
