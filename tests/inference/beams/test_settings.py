"""Settings and results of a beam search; `test_search.py` compares what it finds with `transformers`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron.config.sampling_flags import BeamFlags
from megatron.errors import ConfigError
from megatron.inference.beams import Beam, BeamSettings


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
