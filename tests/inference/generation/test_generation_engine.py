"""The engine: every text of a mixed batch is the text that the request gets alone, for every architecture."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.errors import ConfigError, NumericsError
from megatron.inference.generation import GenerationEngine, Request, generate_all, recompute
from megatron.inference.sampling import Chooser, Sampling
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.networks import forward
from tests.inference.networks import GREEDY, load, mixed_requests, texts

FACTORS = {"rope_short_factors": (1.0,) * 3, "rope_long_factors": (3.0,) * 3, "rope_original_max_positions": 8}
ROPE = {"position_embedding_type": "rope", "rope_original_max_positions": 8}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {**ROPE, "rope_scaling_type": "linear", "rope_scaling_factor": 2.0},
    "llama3": {**ROPE, "rope_scaling_type": "llama3"},
    "yarn": {**ROPE, "rope_scaling_type": "yarn"},
    "longrope": {**ROPE, "rope_scaling_type": "longrope", **FACTORS},
    "dynamic": {**ROPE, "rope_scaling_type": "dynamic", "rope_scaling_factor": 2.0},
}
EACH = pytest.mark.parametrize(
    "changes", [*ARCHITECTURES.values(), *SCALINGS.values()], ids=[*ARCHITECTURES, *SCALINGS]
)


def steps(engine: GenerationEngine, count: int = 10_000) -> dict[str, list[int | None]]:
    """The tokens of every request after some steps."""
    found: dict[str, list[int | None]] = {}
    while count and not engine.is_idle:
        for generated in engine.step():
            found.setdefault(generated.request_id, []).append(generated.token)
        count -= 1
    return found


@pytest.mark.sampled(4)
@EACH
def test_a_text_does_not_depend_on_the_batch(changes: dict[str, Any]) -> None:
    loaded = load(changes)
    requests = mixed_requests(5)
    mixed = generate_all(loaded, requests)
    alone = [generate_all(loaded, [request])[0] for request in requests]
    crowded = generate_all(loaded, requests, max_sequences=3)
    assert texts(mixed) == texts(alone) == texts(crowded)
    for one, other in zip(mixed, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    if changes.get("rope_scaling_type") != "dynamic":  # its keys keep the frequencies of the length they came at
        assert texts(mixed) == texts([recompute(loaded, request) for request in requests])
    assert len(set(texts(mixed))) == 5


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma", "experts"])
def test_mixed_batches_in_bfloat16(name: str) -> None:
    loaded = load(ARCHITECTURES[name], dtype=torch.bfloat16)
    requests = mixed_requests(5, new_tokens=8)
    assert texts(generate_all(loaded, requests)) == texts([generate_all(loaded, [one])[0] for one in requests])


def test_draws_do_not_depend_on_the_batch() -> None:
    loaded = load(ARCHITECTURES["llama"])
    for seed in range(2):
        sampling = Sampling(temperature=1.3, top_p=0.95, repetition_penalty=1.1, seed=seed)
        requests = mixed_requests(4, sampling=sampling, seed=seed)
        mixed = texts(generate_all(loaded, requests))
        assert mixed == texts(generate_all(loaded, requests, max_sequences=2))
        assert mixed == texts([recompute(loaded, request) for request in requests])


def test_requests_join_and_leave_between_steps() -> None:
    loaded = load()
    requests = mixed_requests(6, new_tokens=6)
    expected = {request.id: list(generate_all(loaded, [request])[0].tokens) for request in requests}
    engine = GenerationEngine(loaded, max_sequences=2)
    found: dict[str, list[int | None]] = {}
    for request in requests:  # one more after every second step
        engine.add(request)
        for token in (*engine.step(), *engine.step()):
            found.setdefault(token.request_id, []).append(token.token)
    assert engine._schedule.waiting and len(engine._schedule.running) <= 2
    for request_id, tokens in steps(engine).items():
        found.setdefault(request_id, []).extend(tokens)
    assert found == expected and engine.is_idle and engine.cache_bytes == 0


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    loaded = load({"max_position_embeddings": 400})
    engine = GenerationEngine(loaded)
    engine.add(Request("short", (1, 2), 8, GREEDY))
    engine.step()
    long = Request("long", tuple(token % 101 for token in range(300)), 8, GREEDY)
    engine.add(long)
    while_prompt = [[token.request_id for token in engine.step()] for _ in range(3)]
    assert while_prompt == [["short"], ["short"], ["short", "long"]]  # 300 tokens are three chunks
    rest = steps(engine)
    assert len(rest["short"]) == 4 and len(rest["long"]) == 7
    assert generate_all(loaded, [long])[0].tokens[1:] == tuple(rest["long"])
    assert texts(generate_all(loaded, [long])) == texts([recompute(loaded, long)])


def test_requests_that_can_never_be_served() -> None:
    engine = GenerationEngine(load({"max_position_embeddings": 100}), max_tokens=64)
    with pytest.raises(ConfigError, match=r"may grow to 96 tokens \(50 of the prompt.*room for 64"):
        engine.add(Request("a", (1,) * 50, 20, GREEDY))
    with pytest.raises(ConfigError, match=r"request a has 100 tokens, and the model has 100 positions.*at most 99"):
        engine.add(Request("a", (1,) * 100, 20, GREEDY))
    with pytest.raises(ConfigError, match=r"request a has token 101, and the model's ids are 0 to 100"):
        engine.add(Request("a", (1, 101), 20, GREEDY))
    with pytest.raises(ConfigError, match=r"logit_bias of request a has token 7000"):
        engine.add(Request("a", (1,), 20, Sampling(logit_bias=((7000, 1.0),))))
    engine.add(Request("a", (1,), 20, GREEDY))
    with pytest.raises(ConfigError, match="Request a is being served already"):
        engine.add(Request("a", (1,), 20, GREEDY))
    with pytest.raises(ConfigError, match="max_sequences is 0"):
        GenerationEngine(load(), max_sequences=0)
    assert len(steps(engine)["a"]) == 20


def test_cancelled_requests_are_reported_once_and_free_their_memory() -> None:
    engine = GenerationEngine(load(), max_sequences=1)
    for request in mixed_requests(3):
        engine.add(request)
    engine.step()
    engine.cancel("0")
    engine.cancel("2")  # still waits
    engine.cancel("never came")
    assert engine.cache_bytes == 0
    first = engine.step()
    assert [(token.request_id, token.token, token.finish) for token in first[:2]] == [
        ("0", None, "cancelled"),
        ("2", None, "cancelled"),
    ]
    assert [token.request_id for token in first[2:]] == ["1"]
    assert set(steps(engine)) == {"1"}


def test_stop_tokens_and_lengths_end_a_text() -> None:
    loaded = load()
    free = generate_all(loaded, [Request("free", (5, 6, 7), 10, GREEDY)])[0]
    assert (len(free.tokens), free.finish) == (10, "length")
    stop = free.tokens[4]
    first = free.tokens.index(stop)
    request = Request("ended", (5, 6, 7), 10, GREEDY, stop_ids=frozenset({stop}))
    ended = generate_all(loaded, [request])[0]
    assert (ended.tokens, ended.finish) == (free.tokens[:first], "stop")
    assert len(ended.logprobs) == len(ended.top) == first
    beyond = generate_all(loaded, [Request("long", (5, 6, 7), 99, GREEDY)])[0]
    assert (len(beyond.tokens), beyond.finish) == (13, "length")  # 16 positions


def test_log_probabilities_are_those_of_the_whole_text() -> None:
    loaded = load(ARCHITECTURES["llama"])
    (found,) = generate_all(loaded, [Request("a", (5, 6, 7), 6, Sampling(seed=3), top_logprobs=3)])
    tokens = torch.tensor([[5, 6, 7, *found.tokens]])
    scores = forward(loaded.model, tokens, torch.tensor([0]))[0, 2:-1, :101].log_softmax(dim=-1)
    for step, token in enumerate(found.tokens):
        assert found.logprobs[step] == pytest.approx(scores[step, token].item(), abs=1e-4)
        best = scores[step].topk(3)
        assert [other for other, _ in found.top[step]] == best.indices.tolist()
        assert [value for _, value in found.top[step]] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_tokens_that_the_tokenizer_does_not_know_are_never_chosen() -> None:
    loaded = load()
    tokenizer: Any = SimpleNamespace(vocab_size=7)
    loaded = dataclasses.replace(loaded, tokenizer=tokenizer)
    wild = Sampling(temperature=50.0)
    found = generate_all(loaded, [Request(str(n), (1,), 15, wild, sample=n) for n in range(8)])
    assert max(token for one in found for token in one.tokens) == 6


def test_a_request_that_fails_ends_alone_and_frees_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, drawn = load(), Sampling(temperature=1.5, seed=4)
    requests = mixed_requests(3, longest=4, new_tokens=6, sampling=drawn)
    expected = [one.tokens for one in generate_all(loaded, [requests[0], requests[2]])]
    usual = Chooser.draw

    def draw(self: Chooser) -> float:
        if self.sample == 1 and self._chosen == 2:
            raise KeyError("row of request 1")
        return usual(self)

    monkeypatch.setattr(Chooser, "draw", draw)
    engine = GenerationEngine(loaded, isolates_failures=True)
    for request in requests:
        engine.add(request)
    found: dict[str, list[int | None]] = {}
    failures = []
    while not engine.is_idle:
        for one in engine.step():
            found.setdefault(one.request_id, []).append(one.token)
            failures += [one] if one.failure else []
    assert [tuple(found[request.id]) for request in (requests[0], requests[2])] == expected
    assert [(one.request_id, one.token, one.finish) for one in failures] == [("1", None, "failed")]
    assert "row of request 1" in (failures[0].failure or "") and len(found["1"]) == 3
    assert engine.cache_bytes == 0 and engine._schedule.reserved_tokens == 0
    engine.add(requests[0])  # the id and the room are free
    assert tuple(steps(engine)["0"]) == expected[0]
    with pytest.raises(RuntimeError, match="row of request 1"):
        generate_all(loaded, requests)


def test_a_network_that_computes_no_numbers_is_named() -> None:
    loaded = load()
    with torch.no_grad():
        next(loaded.model.parameters()).fill_(float("nan"))
    with pytest.raises(NumericsError, match="NaN"):
        generate_all(loaded, [Request("a", (1,), 3, GREEDY)])
