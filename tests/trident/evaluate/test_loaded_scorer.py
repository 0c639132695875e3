"""Scores of a loaded checkpoint: against plain log-softmax, and equal in every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.errors import DataError
from megatron.inference.loaded_model import LoadedModel, open_checkpoint
from megatron.model.interface.step_context import StepSettings
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.layouts import Layout
from tests.helpers.networks import forward
from tests.helpers.ranks import run_ranks
from tests.inference.checkpoints import POSITIONS, make_checkpoint
from tools.convert import export_hf
from trident.evaluate.loaded_scorer import LoadedScorer
from trident.evaluate.scoring import Query, Score


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


LAYOUTS = {"tp2-dp2": Layout(2), "pp2-dp2": Layout(1, 2), "tp2-pp2": Layout(2, 2), "dp4": Layout()}  # of four ranks


def score_here(rank: int, folder: str) -> dict[str, tuple[list[Score], list[tuple[int, int]]]]:
    """The scores of `some_queries` in each layout on one rank, and the progress it was told of."""
    found = {}
    for name, layout in LAYOUTS.items():
        mesh, told = open_mesh(layout), []
        scorer = LoadedScorer(open_checkpoint(folder, {}, mesh), batch_size=1)
        found[name] = scorer.score(some_queries(), lambda *progress, told=told: told.append(progress)), told
    return found


def close(found: list[Score], expected: list[Score]) -> bool:
    """True if two results differ only by rounding."""
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


def test_with_a_capacity_no_score_depends_on_other_queries(tmp_path: Path) -> None:
    flags = "--num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax --moe-expert-capacity-factor 0.5"
    folder = make_checkpoint(tmp_path, *flags.split(), "--moe-min-capacity", "0")
    loaded = open_checkpoint(str(folder), {}, ParallelMesh.single())
    alone = [LoadedScorer(loaded).score([query])[0] for query in some_queries()]
    assert close(LoadedScorer(loaded, 64).score(some_queries()), alone)


def test_a_query_longer_than_the_network_is_refused(loaded: LoadedModel) -> None:
    scorer = LoadedScorer(loaded)
    assert scorer.max_length == POSITIONS + 1
    with pytest.raises(DataError, match=f"query 0 has {POSITIONS + 2} tokens"):
        scorer.score([Query((1,) * (POSITIONS + 2), 1)])


@pytest.mark.full
def test_every_layout_gives_the_same_scores(checkpoints: Path, loaded: LoadedModel) -> None:
    first, *others = run_ranks(score_here, 4, str(checkpoints))
    assert all(other == first for other in others), "every rank has the same result"
    told: list[tuple[int, int]] = []
    single = LoadedScorer(loaded, 1).score(some_queries(), lambda *progress: told.append(progress))
    for name, (scores, heard) in first.items():
        assert close(scores, single), name
        assert heard[-1] == told[-1] == (12, 12)
        if not name.startswith("tp2"):
            assert scores == single, "the same batches, so the same bits"
    assert [len(heard) for _, heard in first.values()] == [-(-len(told) // dp) for dp in (2, 2, 1, 4)]


def test_a_prefix_language_model_reads_the_context_in_both_directions(tmp_path: Path, loaded: LoadedModel) -> None:
    path = make_checkpoint(tmp_path, "--objective", "prefix")
    prefixed = open_checkpoint(str(path), {}, ParallelMesh.single())
    queries = [Query((4, 5, 6, 7, 8), 3), Query((4, 5, 6, 7, 8, 9), 1)]
    (bound, free), (causal, free_too) = LoadedScorer(prefixed).score(queries), LoadedScorer(loaded).score(queries)
    assert free == free_too, "a context of one token has only one direction"
    assert abs(bound.logprob - causal.logprob) > 0.01
    context = StepSettings(has_prefixes=True).context(
        torch.tensor([0]), None, torch.tensor([[True, True, True, False]])
    )
    with torch.no_grad():
        logits = prefixed.model(torch.tensor([[4, 5, 6, 7]]), context)[0, 2:, : prefixed.config.model.vocab_size]
    assert bound.logprob == pytest.approx(float(logits.log_softmax(-1)[[0, 1], [7, 8]].sum()), rel=1e-5)


def test_scores_are_those_of_transformers(checkpoints: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    assert export_hf.main(["--load", str(checkpoints), "--output", str(tmp_path / "exported")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    for query, score in zip(some_queries(), LoadedScorer(loaded).score(some_queries()), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([query.tokens[:-1]])).logits[0, query.first_target - 1 :]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(query.targets)[:, None])
        assert score.logprob == pytest.approx(float(logprobs.sum()), rel=1e-5)
        assert list(score.predicted) == logits.argmax(-1).tolist()


def test_scores_of_a_checkpoint_see_its_prompts(tmp_path: Path) -> None:
    checkpoints = make_checkpoint(tmp_path, "--objective", "prefix")
    loaded = open_checkpoint(str(checkpoints), {}, ParallelMesh.single())
    assert loaded.sees_prompts
    query = Query(tuple(range(20, 40)), 12)
    (score,) = LoadedScorer(loaded).score([query])
    inputs = torch.tensor([query.tokens[:-1]])
    prefix = torch.arange(inputs.shape[1])[None] < query.first_target
    with torch.no_grad():
        logits = loaded.model(inputs, StepSettings().context(torch.zeros(1, dtype=torch.int64), prefix_mask=prefix))
    logprobs = logits[0, :, : loaded.config.model.vocab_size].log_softmax(-1)
    targets = torch.tensor(query.tokens[query.first_target :])
    expected = logprobs[query.first_target - 1 :].gather(1, targets[:, None]).sum()
    assert score.logprob == pytest.approx(expected.item(), rel=1e-5)
