"""The whole configuration: its sections, its JSON form, and the rules between sections."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from megatron.config import Machine, ModelRequest, RunConfig, RunRequest, TokenizerFacts, check_resume, resolve
from megatron.errors import ConfigError
from tests.config.command_lines import small


def resolved(text: str = "", drop: str = "") -> RunConfig:
    """The small command line on one process."""
    return resolve(small(text, drop), Machine("cpu", 1, False, True), TokenizerFacts(1000, 999, "f"))


def test_a_resolved_run_round_trips_through_json() -> None:
    config = resolved("--train-samples 64 --rampup-batch-size 2 2 8", drop="--train-iters")
    again = RunConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert dataclasses.replace(again, notices=config.notices) == config


def test_a_damaged_record_names_what_it_lacks() -> None:
    saved: dict[str, Any] = resolved().to_json()
    del saved["model"]["num_layers"]
    with pytest.raises(ConfigError, match="the saved configuration lacks num_layers"):
        RunConfig.from_json(saved)


@pytest.mark.parametrize(
    ("section", "name", "value", "text"),
    [
        ("model", None, -1, "has model = -1, expected fields by name"),
        ("model", "num_layers", "4", r"has model.num_layers = '4', expected int\. It is damaged"),
        ("model", "num_layers", None, "has model.num_layers = None, expected int"),
        ("model", "num_layers", True, "has model.num_layers = True, expected int"),
        ("optim", "lr", True, "has optim.lr = True, expected float"),
        ("optim", "lr", [1], r"has optim.lr = \[1\], expected float"),
        ("optim", "train_samples", 1.5, r"has optim.train_samples = 1.5, expected int \| None"),
        ("optim", "rampup_batch_size", [1, 2], r"has optim.rampup_batch_size = \[1, 2\], expected tuple\[int"),
        ("data", "data_path", ["a", {}], r"has data.data_path = \['a', {}\], expected tuple"),
        ("data", "split", 5, "has data.split = 5, expected str"),
        ("report", "log_path", "x\x1b[2J", None),
        ("report", "x\x1b[2J", "y", r"has report.x\\x1b\[2J = 'y', which is unknown"),
        ("provenance", "model.num_layers", 5, "has provenance.model.num_layers = 5, expected str"),
        ("provenance", None, [], r"has provenance = \[\], expected fields"),
    ],
)
def test_a_saved_value_of_another_type_is_named(section: str, name: str | None, value: Any, text: str | None) -> None:
    """Whoever checks such a configuration further would stumble over it."""
    config = resolved()
    saved: dict[str, Any] = json.loads(json.dumps(config.to_json()))
    if name is None:
        saved[section] = value
    else:
        saved[section][name] = value
    if text is None or "which is unknown" in text:  # a resume ignores what it has no field for
        check_resume(saved, config)
    else:
        with pytest.raises(ConfigError, match=f"the saved configuration {text}"):
            check_resume(saved, config)
    if text is None:
        RunConfig.from_json(saved)
    else:
        with pytest.raises(ConfigError, match=f"the saved configuration {text}"):
            RunConfig.from_json(saved)


def test_json_round_trip() -> None:
    config = small(
        "--data-path 1 a 2 b --rampup-batch-size 2 2 20 --train-samples 99 --no-exit-on-signal", drop="--train-iters"
    )
    again = RunRequest.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config
    assert again.optim.rampup_batch_size == (2, 2, 20) and again.data.data_path == ("1", "a", "2", "b")


def test_an_older_file_gets_defaults_and_a_newer_one_is_rejected() -> None:
    saved = small().to_json()
    del saved["optim"]["clip_grad"], saved["provenance"]
    assert RunRequest.from_json(saved).optim.clip_grad == 1.0
    saved["model"]["rope_theta"] = 1e4
    with pytest.raises(ConfigError, match=r"model\.rope_theta = 10000\.0, which is unknown"):
        RunRequest.from_json(saved)


def test_rules_between_sections_hold_for_every_run_config() -> None:
    config = small("--tensor-model-parallel-size 4")
    model = ModelRequest(num_layers=4, hidden_size=64, num_attention_heads=2, max_position_embeddings=32)
    with pytest.raises(ConfigError, match="2 attention heads cannot be split over 4 ranks"):
        dataclasses.replace(config, model=model)
