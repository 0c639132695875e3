"""Networks trained with prefixes attend to their prompts in both directions, in whatever batch they are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron.inference.beams import BeamSettings, beam_search
from megatron.inference.generation import generate_all, recompute
from megatron.inference.loaded_model import open_checkpoint
from megatron.model.interface.step_context import StepSettings
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.architectures import ARCHITECTURES
from tests.inference.checkpoints import make_checkpoint
from tests.inference.networks import load, mixed_requests, texts
from trident.evaluate.loaded_scorer import LoadedScorer
from trident.evaluate.scoring import Query


@pytest.mark.parametrize("name", ["gpt2", "gemma", "window", "bloom"])
def test_a_prompt_is_seen_in_both_directions_whatever_the_batch(name: str) -> None:
    changes = ARCHITECTURES[name]
    loaded = load(changes, objective="prefix")
    requests = mixed_requests(4, new_tokens=4)
    mixed = generate_all(loaded, requests, max_sequences=3)
    assert texts(mixed) == texts([recompute(loaded, request) for request in requests])
    causal = generate_all(load(changes), requests)
    assert any(abs(one.logprobs[0] - other.logprobs[0]) > 1e-3 for one, other in zip(mixed, causal, strict=True))


def test_a_prompt_longer_than_a_chunk_is_computed_at_once() -> None:
    changes = {"max_position_embeddings": 330}
    loaded = load(changes, objective="multitask")
    requests = mixed_requests(3, longest=320, new_tokens=3)
    longest = dataclasses.replace(requests[0], prompt=tuple(range(100)) * 3)
    requests = [longest, *requests[1:]]
    assert texts(generate_all(loaded, requests)) == texts([recompute(loaded, request) for request in requests])


def test_a_beam_search_sees_the_prompt_as_greedy_generation_does() -> None:
    loaded = load(objective="prefix")
    requests = mixed_requests(3, new_tokens=3)
    one_beam = [beam_search(loaded, request.prompt, BeamSettings(beams=1, max_new_tokens=3))[0] for request in requests]
    greedy = generate_all(loaded, requests)
    assert [beam.tokens for beam in one_beam] == texts(greedy)
    for beam, completion in zip(one_beam, greedy, strict=True):
        assert beam.score * len(beam.tokens) == pytest.approx(sum(completion.logprobs), rel=1e-5)


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
