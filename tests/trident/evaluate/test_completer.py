"""Texts of a completer: each prompt's own continuation, stop texts, and prompts that are too long."""

from __future__ import annotations

import pytest

from megatron.inference.generation import Request, recompute
from megatron.inference.loaded_model import LoadedModel, open_checkpoint
from megatron.inference.sampling import Sampling
from megatron.parallel.mesh import ParallelMesh
from tests.inference.checkpoints import POSITIONS, make_checkpoint
from trident.evaluate.completer import LoadedCompleter

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
