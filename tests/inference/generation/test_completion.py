"""Whole texts: their order, and that nothing is generated if one cannot be."""

from __future__ import annotations

import pytest

from megatron.errors import ConfigError
from megatron.inference.generation import Request, completions, generate_all, recompute
from megatron.inference.loaded_model import LoadedModel, open_checkpoint
from megatron.inference.sampling import Sampling
from megatron.parallel.mesh import ParallelMesh
from tests.inference.checkpoints import POSITIONS, make_checkpoint
from tests.inference.networks import GREEDY, load, mixed_requests
from trident.evaluate.completer import LoadedCompleter


def test_texts_come_in_the_order_of_their_requests() -> None:
    requests = [Request(str(number), (number,), 9 - number, GREEDY) for number in range(5)]
    found = list(completions(load(), requests, max_sequences=3))
    assert [one.request for one in found] == requests
    assert [len(one.tokens) for one in found] == [9, 8, 7, 6, 5]
    assert generate_all(load(), []) == []


def test_one_wrong_request_stops_all_before_the_first_step() -> None:
    wrong = Request("wrong", (1,) * 16, 1, GREEDY)
    with pytest.raises(ConfigError, match="request wrong has 16 tokens"):
        next(completions(load(), [*mixed_requests(2), wrong]))
    with pytest.raises(ConfigError, match="request wrong has 16 tokens"):
        recompute(load(), wrong)


def test_recomputing_gives_the_same_answer() -> None:
    request = Request("a", (3, 1), 20, GREEDY, top_logprobs=1)
    (cached,), slow = generate_all(load(), [request]), recompute(load(), request)
    assert (cached.tokens, cached.finish) == (slow.tokens, slow.finish) and len(slow.tokens) == 14
    assert cached.logprobs == pytest.approx(slow.logprobs, abs=1e-4)


PROMPTS = ["def main(argument):", "", "import os, sys, random and then some more words", "x = 1"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    checkpoints = make_checkpoint(tmp_path_factory.mktemp("model"))
    return open_checkpoint(str(checkpoints), {}, ParallelMesh.single())


def greedy(loaded: LoadedModel, tokens: list[int], count: int) -> str:
    stops = frozenset([loaded.tokenizer.eod_id])
    request = Request("0", tuple(tokens), count, Sampling(greedy=True), stop_ids=stops)
    return loaded.tokenizer.decode(recompute(loaded, request).tokens)


def test_each_prompt_goes_on_as_it_would_alone(loaded: LoadedModel) -> None:
    texts = LoadedCompleter(loaded)(PROMPTS, 6, ())
    for prompt, text in zip(PROMPTS, texts, strict=True):
        tokens = loaded.tokenizer.encode(prompt) or [loaded.tokenizer.eod_id]
        assert text == greedy(loaded, tokens, 6).lstrip(" ")
    assert len(set(texts)) == len(PROMPTS)


def test_a_text_ends_before_a_stop_text(loaded: LoadedModel) -> None:
    (whole,) = LoadedCompleter(loaded)(PROMPTS[:1], 6, ())
    stop = whole[2]
    (text,) = LoadedCompleter(loaded)(PROMPTS[:1], 6, ("not in it", stop))
    assert text == whole[: whole.index(stop)]


def test_a_long_prompt_loses_its_beginning(loaded: LoadedModel) -> None:
    prompt = "return the value of the list " * 20
    tokens = loaded.tokenizer.encode(prompt)
    assert len(tokens) > POSITIONS
    assert LoadedCompleter(loaded)([prompt], 8, ()) == [greedy(loaded, tokens[-(POSITIONS - 8) :], 8).lstrip(" ")]


def test_half_of_the_positions_are_kept_for_a_prompt(loaded: LoadedModel) -> None:
    prompt = "return the value of the list " * 20
    tokens = loaded.tokenizer.encode(prompt)[-POSITIONS // 2 :]
    assert LoadedCompleter(loaded)([prompt], 500, ()) == [greedy(loaded, tokens, POSITIONS // 2).lstrip(" ")]
