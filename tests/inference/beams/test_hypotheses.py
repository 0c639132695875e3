"""The search itself, on tables of probabilities: with enough beams it is exhaustive, and it ends when it should."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from megatron.config.sampling_flags import BeamFlags
from megatron.errors import ConfigError
from megatron.inference.beams import Beam, BeamSettings, Hypotheses

VOCABULARY, STOP, LENGTH = 4, 3, 4


def _search(table: torch.Tensor, settings: BeamSettings) -> tuple[list[Beam], int]:
    """The texts that are found, and the number of steps.

    Args:
        table: log-probabilities `[places, v + 1, v]` of the next token after each token, at each place of a text (the
            last for all that follow); the last row stands for the beginning.
    """
    hypotheses = Hypotheses(settings, settings.max_new_tokens)
    steps = itertools.count(1)
    while True:
        step = next(steps)
        rows = [table[min(step, len(table)) - 1, text[-1] if text else -1] for text in hypotheses.running]
        before = list(hypotheses.running)
        continued = hypotheses.extend(torch.stack(rows))
        if continued is None:
            return hypotheses.best(), step
        made = [(*before[parent], token) for parent, token in zip(continued.parents, continued.tokens, strict=True)]
        assert made == hypotheses.running


def _all_texts(table: torch.Tensor, penalty: float) -> list[Beam]:
    """Every text that ends with the stop token or at the greatest length, best first."""
    found = []
    for length in range(1, LENGTH + 1):
        for text in itertools.product(range(VOCABULARY), repeat=length):
            is_stopped = text[-1] == STOP
            if STOP in text[:-1] or (length < LENGTH and not is_stopped):
                continue
            pairs = enumerate(itertools.pairwise((-1, *text)))
            total = sum(float(table[place, before, token]) for place, (before, token) in pairs)
            tokens = text[:-1] if is_stopped else text
            found.append(Beam(tokens, total / length**penalty, "stop" if is_stopped else "length"))
    return sorted(found, key=lambda beam: -beam.score)


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_with_enough_beams_the_search_is_exhaustive(seed: int, penalty: float) -> None:
    draws = torch.Generator().manual_seed(seed)
    table = torch.randn(LENGTH, VOCABULARY + 1, VOCABULARY, generator=draws, dtype=torch.float64).log_softmax(dim=-1)
    expected = _all_texts(table, penalty)
    settings = BeamSettings(
        beams=200, max_new_tokens=LENGTH, length_penalty=penalty, early_stopping="never", returned=200,
        stop_ids=frozenset({STOP}),
    )  # fmt: skip
    found, _ = _search(table, settings)
    assert [(beam.tokens, beam.finish) for beam in found] == [(beam.tokens, beam.finish) for beam in expected]
    assert [beam.score for beam in found] == pytest.approx([beam.score for beam in expected])


def test_when_the_search_ends() -> None:
    """After the first token, the stop token is sure in one text, and unlikely in the other, which is the better one."""
    certain, unlikely = -0.01, -9.0
    table = torch.tensor([
        [certain, -20.0, -20.0, unlikely],  # after 0: again 0
        [-20.0, -20.0, -20.0, certain],  # after 1: stop
        [-20.0, -20.0, -20.0, certain],  # after 2: stop
        [0.0, 0.0, 0.0, 0.0],
        [-0.5, -1.5, -2.0, -20.0],  # the beginning
    ])  # fmt: skip
    steps, lengths = {}, {}
    for early in ("true", "false", "never"):
        settings = BeamSettings(
            beams=2, max_new_tokens=12, early_stopping=early, returned=2, stop_ids=frozenset({STOP})
        )
        found, steps[early] = _search(table.unsqueeze(0), settings)
        lengths[early] = [len(beam.tokens) for beam in found]
    assert steps["true"] < steps["false"] == steps["never"] == 12
    assert lengths["true"][0] == 1 and lengths["never"][0] == 12


def test_the_running_text_that_cannot_win_at_its_present_length_may_win_at_the_greatest() -> None:
    """A high penalty favors long texts: "false" stops although "never" would find a better one."""
    table = torch.tensor([
        [-1.0, -30.0, -30.0, -0.3],  # after 0: stop, or with some loss again 0
        [-30.0, -30.0, -30.0, -0.1],
        [-30.0, -30.0, -30.0, -0.1],
        [0.0, 0.0, 0.0, 0.0],
        [-0.2, -3.0, -30.0, -3.0],
    ])  # fmt: skip
    found = {}
    for early in ("false", "never"):
        settings = BeamSettings(
            beams=2, max_new_tokens=30, length_penalty=2.0, early_stopping=early, stop_ids=frozenset({STOP})
        )
        found[early] = _search(table.unsqueeze(0), settings)
    assert found["false"][1] < found["never"][1] == 30
    assert found["never"][0][0].score > found["false"][0][0].score


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"beams": 0}, "beams is 0. It must be from 1 to 256"),
        ({"beams": 257}, "beams is 257"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0. It must be at least 1"),
        ({"length_penalty": float("nan")}, "length_penalty is nan. It must be from -10 to 10"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon'. It must be false, true or never"),
        ({"returned": 5}, "5 texts were requested of 4 beams"),
    ],
)
def test_settings_that_cannot_be_used(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        BeamSettings(**{"beams": 4, "max_new_tokens": 5, **changes})


def test_the_settings_of_a_command_line() -> None:
    flags = BeamFlags(num_beams=4, length_penalty=2.0, early_stopping="never")
    assert BeamSettings.of_flags(flags, max_new_tokens=7, returned=3, stop_ids=frozenset({1})) == BeamSettings(
        beams=4, max_new_tokens=7, length_penalty=2.0, early_stopping="never", returned=3, stop_ids=frozenset({1})
    )


def test_beams_survive_json() -> None:
    beams = [Beam((1, 2), -0.1, "stop"), Beam((), -1 / 3, "length")]
    assert [Beam.of_json(values) for values in map(dataclasses.asdict, beams)] == beams
    assert dataclasses.replace(beams[0], tokens=()) != beams[0]
