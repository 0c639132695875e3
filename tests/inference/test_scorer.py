"""Scores of a loaded checkpoint: against plain log-softmax, and equal in every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.errors import DataError
from megatron.evaluation.scoring import Query, Score
from megatron.inference.loading import LoadedModel, open_checkpoint
from megatron.inference.scorer import LoadedScorer
from megatron.parallel.joining import close_mesh, open_mesh
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.layouts import Layout
from tests.helpers.networks import forward
from tests.helpers.ranks import run_ranks
from tests.inference.checkpoints import POSITIONS, make_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(checkpoints: Path) -> LoadedModel:
    return open_checkpoint(str(checkpoints), {}, ParallelMesh.single())


def some_queries(count: int = 12) -> list[Query]:
    """Queries of all lengths up to the longest possible."""
    draws = np.random.default_rng(3)
    lengths = [POSITIONS + 1, 2, *draws.integers(2, POSITIONS + 2, count - 2).tolist()]
    return [Query(tuple(draws.integers(0, 256, length).tolist()), int(draws.integers(1, length))) for length in lengths]


def score_here(rank: int, layout: Layout, folder: str) -> tuple[list[Score], list[tuple[int, int]]]:
    """The scores of `some_queries` on one rank, and the progress it was told of."""
    mesh, told = open_mesh(layout), []
    try:
        scorer = LoadedScorer(open_checkpoint(folder, {}, mesh), batch_size=1)
        return scorer.score(some_queries(), lambda *progress: told.append(progress)), told
    finally:
        close_mesh(mesh)


def close(found: list[Score], expected: list[Score]) -> bool:
    """Whether two results differ by rounding only."""
    logprobs = np.allclose([one.logprob for one in found], [one.logprob for one in expected], rtol=1e-5, atol=1e-5)
    return logprobs and [one.predicted for one in found] == [one.predicted for one in expected]


def test_scores_are_log_probabilities_of_the_targets(loaded: LoadedModel) -> None:
    queries = some_queries()
    for query, score in zip(queries, LoadedScorer(loaded, 2).score(queries), strict=True):
        text = torch.tensor([query.tokens])
        with torch.no_grad():
            logits = forward(loaded.model, text[:, :-1], torch.tensor([0]))[0, :, : loaded.config.model.vocab_size]
        logprobs = logits[query.first_target - 1 :].log_softmax(-1).gather(1, text[0, query.first_target :, None])
        assert score.logprob == pytest.approx(float(logprobs.sum()), rel=1e-5)
        assert list(score.predicted) == logits[query.first_target - 1 :].argmax(-1).tolist()
        assert score.tokens == len(query.targets) and not score.is_greedy


def test_a_greedy_continuation_is_greedy(loaded: LoadedModel) -> None:
    scorer = LoadedScorer(loaded)
    (first,) = scorer.score([Query((4, 5, 6, 7), 3)])
    (second,) = scorer.score([Query((4, 5, 6, first.predicted[0]), 3)])
    assert second.is_greedy and second.predicted == first.predicted and second.logprob > first.logprob


def test_the_batch_size_does_not_change_scores(loaded: LoadedModel) -> None:
    alone = [LoadedScorer(loaded).score([query])[0] for query in some_queries()]
    assert close(LoadedScorer(loaded, 1).score(some_queries()), alone)
    assert close(LoadedScorer(loaded, 64).score(some_queries()), alone)


def test_a_query_longer_than_the_network_is_refused(loaded: LoadedModel) -> None:
    scorer = LoadedScorer(loaded)
    assert scorer.max_length == POSITIONS + 1
    with pytest.raises(DataError, match=f"query 0 has {POSITIONS + 2} tokens"):
        scorer.score([Query((1,) * (POSITIONS + 2), 1)])


@pytest.mark.parametrize("layout", [Layout(), Layout(2)], ids=["dp2", "tp2"])
def test_every_layout_gives_the_same_scores(checkpoints: Path, loaded: LoadedModel, layout: Layout) -> None:
    first, second = run_ranks(score_here, 2, layout, str(checkpoints))
    assert first == second
    told: list[tuple[int, int]] = []
    single = LoadedScorer(loaded, 1).score(some_queries(), lambda *progress: told.append(progress))
    assert close(first[0], single)
    assert first[1][-1] == told[-1] == (12, 12)
    if layout == Layout():
        assert first[0] == single, "the same batches, so the same bits"
        assert len(first[1]) == (len(told) + 1) // 2
