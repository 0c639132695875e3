"""Settings check themselves, come from flags and from JSON, and say what is wrong with them."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from megatron.config.sampling_flags import SamplingFlags
from megatron.errors import ConfigError
from megatron.inference.sampling import Sampling

EVERYTHING = Sampling(
    greedy=False, temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, typical_p=0.95, repetition_penalty=1.1,
    frequency_penalty=0.5, presence_penalty=-0.5, logit_bias=((5, -100.0), (7, 1.5)), seed=-3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"temperature": -0.5}, r"temperature -0\.5 is out of range. It must be at least 0"),
        ({"temperature": math.nan}, "temperature nan is not finite"),
        ({"temperature": math.inf}, "temperature inf is not finite"),
        ({"top_k": -1}, "top_k -1 is out of range. It must be at least 0"),
        ({"top_p": 1.5}, r"top_p 1\.5 is out of range. It must be at most 1"),
        ({"min_p": -0.1}, r"min_p -0\.1 is out of range"),
        ({"typical_p": 2.0}, r"typical_p 2\.0 is out of range"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty 0\.0 is out of range. It must be at least 0\.01"),
        ({"frequency_penalty": 2.5}, r"frequency_penalty 2\.5 is out of range. It must be at most 2"),
        ({"presence_penalty": -2.5}, r"presence_penalty -2\.5 is out of range. It must be at least -2"),
        ({"logit_bias": ((3, 101.0),)}, r"logit_bias 101\.0 of token 3 is out of range.*from -100 to 100"),
        ({"logit_bias": ((-3, 1.0),)}, "token -3 is out of range"),
        ({"logit_bias": ((3, math.nan),)}, "logit_bias nan of token 3"),
        ({"logit_bias": ((3, 1.0),) * 1025}, "logit_bias has 1025 tokens. It may have at most 1024"),
        ({"seed": 2**63}, "seed 9223372036854775808 is out of range"),
    ],
)
def test_values_out_of_bounds(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Sampling(**changes)


def test_all_problems_are_shown_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(top_k=-1, top_p=7.0, seed=2**70)
    assert len(caught.value.problems) == 3


def test_json_gives_back_the_same_settings() -> None:
    assert Sampling.of_json(json.loads(json.dumps(EVERYTHING.to_json()))) == EVERYTHING
    assert set(EVERYTHING.to_json()) == {field.name for field in dataclasses.fields(Sampling)}


def test_whole_numbers_become_floats() -> None:
    found = Sampling.of_json({"temperature": 1, "logit_bias": {"100": 100}})
    made = Sampling(temperature=1, logit_bias=((100, 100),))
    for one in (found, made, Sampling.of_json({"logit_bias": [[100, 100]]})):
        assert type(one.temperature) is float and [type(bias) for _, bias in one.logit_bias] == [float]


def test_what_json_leaves_out_has_its_default() -> None:
    assert Sampling.of_json({}) == Sampling.of_json({"top_p": None, "logit_bias": None}) == Sampling()
    assert Sampling.of_json({"temperature": 1, "top_k": 5.0}) == Sampling(temperature=1.0, top_k=5)
    assert Sampling.of_json({"logit_bias": {"50": -100, "7": 0.5}}).logit_bias == ((50, -100), (7, 0.5))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": "warm"}, "temperature must be a number, not 'warm'"),
        ({"temperature": "1"}, "temperature must be a number, not '1'"),
        ({"temperature": True}, "temperature must be a number, not True"),
        ({"temperature": math.nan}, "temperature must be a number, not nan"),
        ({"temperature": 10**400}, "temperature must be a number"),
        ({"top_k": 1.5}, r"top_k must be an integer, not 1\.5"),
        ({"top_p": [0.5]}, r"top_p must be a number, not \[0\.5\]"),
        ({"greedy": 1}, "greedy must be true or false, not 1"),
        ({"seed": "1"}, "seed must be an integer, not '1'"),
        ({"top_p": 1.5}, r"top_p 1\.5 is out of range"),
        ({"topp": 0.5}, "topp is unknown. Use one of: temperature, greedy, top_k"),
        ({"logit_bias": 3}, "logit_bias must be an object of at most 1024 biases by token id, not 3"),
        ({"logit_bias": {"a": 1.0}}, r"logit_bias must give a number for each token id, not \('a', 1\.0\)"),
        ({"logit_bias": {"5": "1"}}, r"logit_bias must give a number for each token id, not \(5, '1'\)|\('5', '1'\)"),
        ({"logit_bias": [[5]]}, r"logit_bias must give a number for each token id, not \[5\]"),
        ({"logit_bias": {"5": 10**400}}, "of token 5 is out of range"),
        ({"logit_bias": {str(10**50): 1.0}}, "logit_bias must give a number for each token id"),
        ({"logit_bias": {str(number): 0 for number in range(2000)}}, "at most 1024 biases"),
    ],
)
def test_unusable_json(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Sampling.of_json(values)


def test_the_settings_of_a_command_line() -> None:
    flags = SamplingFlags(temperature=0.7, top_k=3, min_p=0.1, logit_bias=("5=-100", "7=1.5"))
    assert Sampling.of_flags(flags, 99) == Sampling(
        temperature=0.7, top_k=3, min_p=0.1, logit_bias=((5, -100.0), (7, 1.5)), seed=99
    )
