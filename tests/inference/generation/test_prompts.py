"""Networks trained with prefixes attend to their prompts in both directions, in whatever batch they are."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.inference.beams import BeamSettings, beam_search
from megatron.inference.generation import generate_all, recompute
from tests.helpers.architectures import ARCHITECTURES
from tests.inference.networks import load, mixed_requests, texts


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
