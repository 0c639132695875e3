"""Log-probabilities of prompts: the engine's equal the scorer's, whatever else it computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.errors import ConfigError
from megatron.inference.generation import GeneratedToken, GenerationEngine, Request
from megatron.inference.loaded_model import LoadedModel, open_checkpoint
from megatron.inference.sampling import Sampling
from megatron.parallel.mesh import ParallelMesh
from tests.inference.checkpoints import make_checkpoint
from trident.evaluate.loaded_scorer import LoadedScorer
from trident.evaluate.scoring import Query

POSITIONS = 300
GREEDY = Sampling(greedy=True)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    checkpoints = make_checkpoint(tmp_path_factory.mktemp("model"), positions=POSITIONS)
    return open_checkpoint(str(checkpoints), {}, ParallelMesh.single())


def answers(loaded: LoadedModel, *requests: Request) -> dict[str, list[GeneratedToken]]:
    """All tokens of each request, computed together."""
    engine = GenerationEngine(loaded)
    for request in requests:
        engine.add(request)
    found: dict[str, list[GeneratedToken]] = {request.id: [] for request in requests}
    while not engine.is_idle:
        for one in engine.step():
            found[one.request_id].append(one)
    return found


def test_prompts_are_scored_in_chunks_and_in_batches(loaded: LoadedModel) -> None:
    long = tuple(number * 7 % 300 for number in range(POSITIONS))
    prompts = {"whole": long, "short": long[3:20], "one": long[:1], "both": long[:140]}
    scored = [
        Request(name, prompt, 3 if name == "both" else 0, GREEDY, top_logprobs=2, scores_prompt=True)
        for name, prompt in prompts.items()
    ]
    plain = Request("plain", long[:140], 3, GREEDY)
    found = answers(loaded, *scored, plain)
    for request in scored:
        first, *others = found[request.id]
        assert [one.token for one in first.prompt] == list(request.prompt[1:])
        queries = [Query(request.prompt[: place + 1], place) for place in range(1, len(request.prompt))]
        scores = LoadedScorer(loaded).score(queries)
        assert [one.logprob for one in first.prompt] == pytest.approx([score.logprob for score in scores], abs=1e-4)
        assert [one.top[0][0] for one in first.prompt] == [score.predicted[0] for score in scores]
        assert all((one.logprob == one.top[0][1]) == (one.token == one.top[0][0]) for one in first.prompt)
        assert not any(other.prompt for other in others)
    assert all(len(found[name]) == 1 and found[name][0].token is None for name in ("whole", "short", "one"))
    assert found["whole"][0].finish == "length"
    assert [one.token for one in found["both"]] == [one.token for one in found["plain"]]


def test_what_cannot_be_scored_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="max_new_tokens of request a is 0"):
        Request("a", (1,), 0, GREEDY)
    whole = Request("a", (1,) * (POSITIONS + 1), 0, GREEDY, scores_prompt=True)
    with pytest.raises(ConfigError, match=f"has {POSITIONS + 1} tokens, and the model has {POSITIONS} positions"):
        answers(loaded, whole)
    prefixes = replace(loaded, config=replace(loaded.config, loss=replace(loaded.config.loss, objective="prefix")))
    with pytest.raises(ConfigError, match="Request a is for the log-probabilities of its prompt, .* both directions"):
        answers(prefixes, replace(whole, prompt=(1, 2)))
