"""Guessed tokens change no text, and where the guesses are good, more tokens come at once."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from megatron.data.loader import Batch
from megatron.errors import ConfigError
from megatron.inference.generation import GenerationEngine, Request, generate_all, recompute
from megatron.inference.loaded_model import LoadedModel
from megatron.inference.sampling import Sampling
from megatron.model.interface.step_context import StepSettings
from megatron.objective.multi_token import MultiTokenObjective
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.networks import SEED
from tests.inference.networks import GREEDY, load, mixed_requests, texts

CHANGES: dict[str, Any] = {
    **ARCHITECTURES["llama"], "mtp_num_layers": 1, "max_position_embeddings": 300, "init_method_std": 0.05,
}  # fmt: skip
DRAWN = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.05, seed=3)


@cache
def trained() -> LoadedModel:
    """A network that has learned to count, with some noise."""
    loaded = load(CHANGES)
    model, draws = loaded.model.train(), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    objective = MultiTokenObjective(loaded.mesh.tp, 101, scale=1.0)
    for _ in range(60):
        rows = draws.integers(0, 101, (8, 1)) + np.arange(17)
        rows = np.where(draws.random(rows.shape) < 0.05, draws.integers(0, 101, rows.shape), rows % 101)
        batch = Batch(rows[:, :-1], rows[:, 1:], np.ones((8, 16), np.float32), np.arange(8), None)
        tokens = torch.from_numpy(batch.tokens)
        context = StepSettings(seed=SEED, has_tokens=True).context(torch.arange(8), tokens=tokens)
        targets = {name: torch.from_numpy(values) for name, values in objective.targets(batch).items()}
        result = objective(model(tokens, context), targets)
        assert result.minimized_sum is not None
        optimizer.zero_grad()
        (result.minimized_sum / result.token_count).backward()
        optimizer.step()
    model.eval()
    return loaded


def counted(guessed: int, sampling: Sampling = GREEDY) -> tuple[GenerationEngine, list[Request]]:
    """An engine, and requests whose prompts count, of one token to more than two chunks."""
    requests = [
        Request(str(number), tuple((20 * number + place) % 101 for place in range(length)), 30, sampling, number)
        for number, length in enumerate([6, 1, 9, 280, 12])
    ]
    return GenerationEngine(trained(), speculative_tokens=guessed), requests


def finished(engine: GenerationEngine, requests: list[Request]) -> list[tuple[int, ...]]:
    for request in requests:
        engine.add(request)
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    while not engine.is_idle:
        for one in engine.step():
            assert one.token is not None
            found[one.request_id].append(one.token)
    return [tuple(tokens) for tokens in found.values()]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("guessed", [1, 3])
def test_texts_are_the_same_and_come_in_fewer_passes(guessed: int, sampling: Sampling) -> None:
    engine, requests = counted(guessed, sampling)
    expected = texts(generate_all(trained(), requests))
    assert finished(engine, requests) == expected
    assert expected[:3] == texts([recompute(trained(), request) for request in requests[:3]])
    counts = engine.speculation
    assert counts.tokens == sum(map(len, expected)) == counts.passes + counts.accepted
    assert counts.accepted > 0.4 * counts.guessed > 0
    assert f"{counts.accepted / counts.guessed:.1%} of {counts.guessed} drafted tokens" in counts.sentence


def test_bad_guesses_change_no_text_either() -> None:
    loaded = load({**CHANGES, "init_method_std": 0.4, "num_experts": 4, "attention_window": 5})
    requests = mixed_requests(5, sampling=DRAWN)
    engine = GenerationEngine(loaded, max_sequences=2, speculative_tokens=2)
    assert finished(engine, requests) == texts(generate_all(loaded, requests))
    assert engine.speculation.accepted < 0.2 * engine.speculation.guessed


def test_a_text_ends_at_its_stop_token_and_requests_leave_at_any_time() -> None:
    engine, requests = counted(3)
    stop = generate_all(trained(), requests[:1])[0].tokens[10]
    stopped = Request("stopped", requests[0].prompt, 30, GREEDY, stop_ids=frozenset({stop}))
    (expected,) = generate_all(trained(), [stopped])
    (found,) = generate_all(trained(), [stopped], speculative_tokens=3)
    assert (found.tokens, found.finish) == (expected.tokens, expected.finish) and found.finish == "stop"
    scored = Request("scored", requests[2].prompt, 0, GREEDY, scores_prompt=True)
    for request in (*requests[:2], scored):
        engine.add(request)
    tokens = [one for _ in range(3) for one in engine.step()]
    engine.cancel("1")
    tokens += [one for _ in range(3) for one in engine.step()]
    assert [one.finish for one in tokens if one.request_id == "scored"] == ["length"]
    assert [one.finish for one in tokens if one.request_id == "1"][-1] == "cancelled"


def test_a_network_that_cannot_guess_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--speculative-tokens 2 requires a checkpoint trained with multi-token"):
        GenerationEngine(load(), speculative_tokens=2)
    rope = {"rope_scaling_type": "dynamic", "rope_original_max_positions": 8, "rope_scaling_factor": 2.0}
    with pytest.raises(ConfigError, match="--speculative-tokens 2 cannot be combined with --rope-scaling-type dynamic"):
        GenerationEngine(load({**CHANGES, **rope}), speculative_tokens=2)
