"""Engines on several ranks: every layout gives the text of one process, and a lost rank ends all."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.inference.generation import GenerationEngine, Request, drive, generate_all, recompute, serve_as_worker
from megatron.inference.generation.ranks import HEARTBEAT_SECONDS
from megatron.inference.sampling import Chooser, Sampling
from megatron.parallel.joining import open_mesh
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.layouts import Layout
from tests.helpers.ranks import RankFailure, run_ranks
from tests.inference.networks import GREEDY, load, mixed_requests, texts

SHOWN = ("gpt2", "llama", "gemma", "olmo2, two groups", "experts")
DRAWN = Sampling(temperature=1.2, top_k=40, seed=9)


def everything(rank: int, tp: int, pp: int) -> dict[str, Any]:
    """Texts of several architectures, greedy and drawn."""
    mesh = open_mesh(Layout(tp, pp)) if tp * pp > 1 else None
    found: dict[str, Any] = {}
    for name in SHOWN:
        loaded = load(ARCHITECTURES[name], mesh)
        for sampling in (GREEDY, DRAWN):
            requests = mixed_requests(4, new_tokens=8, sampling=sampling, top_logprobs=2)
            completions = generate_all(loaded, requests)
            found[f"{name} {sampling.greedy}"] = texts(completions)
    found["logprobs"], found["top"] = completions[-1].logprobs, completions[-1].top
    guessing = load({**ARCHITECTURES["llama"], "mtp_num_layers": 1}, mesh)
    found["guessed"] = texts(generate_all(guessing, requests, speculative_tokens=2))
    found["recompute"] = recompute(loaded, requests[-1]).tokens
    return found


def test_every_layout_gives_the_texts_of_one_process() -> None:
    expected = everything(0, 1, 1)
    for found in run_ranks(everything, 4, 2, 2):
        values = [(ours["logprobs"], ours["top"]) for ours in (found, expected)]
        assert values[0][0] == pytest.approx(values[1][0], abs=1e-4)
        assert [[token for token, _ in top] for top in values[0][1]] == [[t for t, _ in top] for top in values[1][1]]
        for key in found.keys() - {"logprobs", "top"}:
            assert found[key] == expected[key], key


def driven(rank: int, tp: int, pp: int) -> dict[str, Any]:
    """Rank 0 adds, cancels and pauses for a while; the other ranks are workers."""
    loaded = load(ARCHITECTURES["llama"], open_mesh(Layout(tp, pp)))
    engine = GenerationEngine(loaded)
    if rank > 0:
        if rank == 1:
            with pytest.raises(ConfigError, match="Rank 1 cannot drive"):
                drive(engine)
        cpu_before, before = time.process_time(), time.monotonic()
        serve_as_worker(engine)
        return {"share": (time.process_time() - cpu_before) / (time.monotonic() - before), "idle": engine.is_idle}
    tokens: dict[str, list[int | None]] = {}
    with drive(engine) as driver:
        requests = mixed_requests(3)
        for request in requests:
            driver.add(request)
        with pytest.raises(ConfigError, match="Request 0 is being served already"):
            driver.add(requests[0])
        driver.step()
        driver.cancel("1")
        time.sleep(1.5 * HEARTBEAT_SECONDS)
        driver.check_ranks()
        while not engine.is_idle:
            for token in driver.step():
                tokens.setdefault(token.request_id, []).append(token.token)
    return tokens


@pytest.mark.full
def test_rank_0_drives_and_waiting_ranks_sleep() -> None:
    (tokens, *followers) = run_ranks(driven, 2, 1, 2)
    loaded = load(ARCHITECTURES["llama"])
    requests = mixed_requests(3)
    for request in (requests[0], requests[2]):
        assert tuple(tokens[request.id]) == generate_all(loaded, [request])[0].tokens[1:]
    assert tokens["1"] == [None]
    assert all(follower["idle"] and follower["share"] < 0.5 for follower in followers)


class Failing(Chooser):
    """The second token of sample 1 cannot be drawn."""

    def draw(self) -> float:
        if self.sample == 1 and self._chosen == 1:
            raise KeyError("row of sample 1")
        return super().draw()


def failing(rank: int, tp: int, pp: int) -> list[tuple[str, int | None, str | None]]:
    """The tokens of an engine's steps, while the token of one request cannot be chosen."""
    engine = GenerationEngine(load(mesh=open_mesh(Layout(tp, pp)) if tp * pp > 1 else None), isolates_failures=True)
    requests = mixed_requests(3, longest=4, new_tokens=4, sampling=DRAWN)
    for request in requests:
        engine.add(request)
    for text in engine._schedule.waiting:
        text.chooser = Failing(DRAWN, text.request.prompt, text.request.sample)
    found = []
    while not engine.is_idle:
        found += [(one.request_id, one.token, one.finish) for one in engine.step()]
    assert engine.cache_bytes == 0
    return found


def test_a_request_that_fails_ends_alike_on_all_ranks() -> None:
    expected = failing(0, 1, 1)
    assert [one for one in expected if one[2] == "failed"] == [("1", None, "failed")]
    assert run_ranks(failing, 2, 1, 2) == [expected, expected]


def left_alone(rank: int, ends: int) -> None:
    """One rank ends without a word; the other must notice."""
    engine = GenerationEngine(load(mesh=open_mesh(Layout(1, 2))))
    if rank == ends and rank == 1:
        os._exit(0)
    if rank == 1:
        serve_as_worker(engine)
        return
    driver = drive(engine)
    driver.add(Request("a", (1, 2), 4, GREEDY))
    if ends == 0:
        driver.step()
        os._exit(0)
    while True:
        driver.check_ranks()
        time.sleep(0.1)


@pytest.mark.parametrize("ends", [0, 1])
def test_a_rank_that_ends_ends_all(ends: int) -> None:
    with pytest.raises(RankFailure, match="PeerLostError: A rank of the generation engine ended|ended without a word"):
        run_ranks(left_alone, 2, ends, timeout_seconds=120)


def test_an_engine_of_one_rank_can_be_driven() -> None:
    with drive(GenerationEngine(load())) as driver:
        driver.add(Request("a", (1, 2), 4, GREEDY))
        found = [token.token for _ in range(4) for token in driver.step()]
    assert tuple(found) == generate_all(load(), [Request("a", (1, 2), 4, GREEDY)])[0].tokens
