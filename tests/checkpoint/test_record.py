"""The record: through JSON and back, its keys, and every entry that is missing or wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.record import Progress, Record
from megatron.data.order.plan import GroupPlan, Phase, PhaseMember, SourcePlan
from megatron.errors import CheckpointError, DataError
from tests.checkpoint.made.records import PLAN, make_record

PATH = Path("run/iter_0000004")


def test_a_record_round_trips_through_json() -> None:
    record = make_record()
    assert Record.from_json(json.loads(json.dumps(record.to_json())), PATH) == record


def test_the_keys_are_those_of_the_format() -> None:
    value = make_record().to_json()
    assert value["progress"] == {"step": 4, "consumed_samples": 32, "consumed_tokens": 320, "skipped_steps": 0}
    assert value["tokenizer"] == {"fingerprint": "a" * 64, "vocab_size": 600, "name": "GPT2BPE"}
    assert value["program"] == {"version": "0.1"}
    assert set(value) == {
        *("progress", "optimizer_updates", "loss_scale", "config", "data_plan", "data", "tokenizer", "program")
    }


OPTIONAL: dict[str, Any] = {
    "run_id": "0123456789abcdef",
    "finetuned_from": {"run_id": "fedcba9876543210", "step": 3},
    "validation_loss": 2.5,
    "recent": {"losses": [3.0, 2.5]},
    "passed_batches": [{"step": 3, "first_sample": 16, "last_sample": 23}],
    "began_at": {"decoder.layers.0.mlp.linear_fc1.weight": 2},
    "averaged_from": {"decoder.layers.0.mlp.linear_fc1.weight": 0.5},
}


def test_optional_entries_round_trip() -> None:
    record = make_record(**{**OPTIONAL, "passed_batches": tuple(OPTIONAL["passed_batches"])})
    value = json.loads(json.dumps(record.to_json()))
    assert {name: value[name] for name in OPTIONAL} == OPTIONAL
    assert Record.from_json(value, PATH) == record


@pytest.mark.parametrize(
    ("name", "entry", "text"),
    [
        ("run_id", 3, "run_id = 3, expected 16 hexadecimal digits"),
        ("run_id", "x\x1b[2J", r"run_id = .x.x1b\[2J., expected 16 hexadecimal digits"),
        (
            "finetuned_from",
            {"run_id": "x"},
            r"finetuned_from = \{.run_id.: .x.\}, expected an object with run_id, step",
        ),
        ("validation_loss", "low", "validation_loss = 'low', expected a number or null"),
        ("recent", {"losses": [True]}, "recent.losses = .True., expected a list of numbers"),
        ("passed_batches", [{"step": 1}], "passed_batches = .*, expected an object with step, first_sample"),
    ],
)
def test_a_wrong_optional_entry_is_named(name: str, entry: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=f"record of {PATH} has {text}"):
        Record.from_json({**make_record().to_json(), name: entry}, PATH)


@pytest.mark.parametrize("section", ["control", "somewhere_else"])
def test_the_optimizer_state_is_optional(section: str) -> None:
    assert make_record().has_optimizer_state
    assert not make_record(config={section: {"no_save_optim": True}, "provenance": []}).has_optimizer_state


@pytest.mark.parametrize("name", sorted(make_record().to_json()))
def test_a_missing_entry_is_named(name: str) -> None:
    value = make_record().to_json()
    del value[name]
    with pytest.raises(CheckpointError, match=rf"record of {PATH} has no {name} \(it has .*\).*--load"):
        Record.from_json(value, PATH)


@pytest.mark.parametrize(
    ("name", "entry", "text"),
    [
        ("progress", 3, "progress = 3, expected a JSON object"),
        ("optimizer_updates", -1, "optimizer_updates = -1, expected an integer >= 0"),
        ("loss_scale", {"cur_scale": "big"}, "loss_scale.cur_scale = 'big', expected a number"),
        ("config", [], r"config = \[\], expected a JSON object"),
        ("config", {"a\x1b[2J": 1}, r"config.a\\x1b\[2J = 1, expected a JSON object"),
        (
            "tokenizer",
            {"fingerprint": "f", "vocab_size": 2, "name": "a", "eod_id": "x"},
            "tokenizer.eod_id = 'x', expected",
        ),
        ("optimizer_updates", 2**53 + 1, "optimizer_updates = 9007199254740993, expected"),
        ("loss_scale", {"cur_scale": True}, "loss_scale.cur_scale = True, expected a number"),
        ("config", "x" * 500, "config = 'x{76}\\.\\.\\., expected"),
        ("tokenizer", {"fingerprint": 1, "vocab_size": 2, "name": "a"}, "tokenizer.fingerprint = 1, expected a"),
        ("tokenizer", {"fingerprint": "f", "vocab_size": "2", "name": "a"}, "tokenizer.vocab_size = '2', expected"),
        ("tokenizer", {"fingerprint": "f", "vocab_size": 2}, "tokenizer.name = None, expected a text"),
    ],
)
def test_a_wrong_entry_is_named_with_its_value(name: str, entry: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=f"record of {PATH} has {text}"):
        Record.from_json({**make_record().to_json(), name: entry}, PATH)


def test_an_invalid_plan_or_progress_is_rejected_by_its_own_type() -> None:
    with pytest.raises(DataError, match="stored data plan has format None"):
        Record.from_json({**make_record().to_json(), "data_plan": {}}, PATH)
    with pytest.raises(CheckpointError, match="step missing, unknown or not an integer"):
        Record.from_json({**make_record().to_json(), "progress": {"step": "4"}}, PATH)


def test_more_samples_than_the_plan_has_cannot_have_been_consumed() -> None:
    source = SourcePlan("corpus", "f" * 64, 0, 100, 1000)
    train = GroupPlan("train", (source,), (Phase(0, (PhaseMember(0, 1.0),), blended=False),))
    plan = dataclasses.replace(PLAN, train=train).extended((40, 0, 0))
    assert plan.train is not None and plan.train.available == 62
    assert Record.from_json(make_record(7, data_plan=plan).to_json(), PATH).progress.consumed_samples == 56
    with pytest.raises(CheckpointError, match=rf"record of {PATH} has 64 consumed samples, .* only 62"):
        Record.from_json(make_record(8, data_plan=plan).to_json(), PATH)


def test_names_of_a_hostile_record_are_escaped_and_few() -> None:
    value = {f"\x1b]0;owned\x07{number}": 1 for number in range(1000)}
    with pytest.raises(CheckpointError, match=r"has no progress \(it has \\x1b\]0;owned\\x070, .* and 980 more\)"):
        Record.from_json(value, PATH)
    with pytest.raises(
        CheckpointError, match=r"progress \{.*\} cannot be used: .*\\x1b\]0;owned.* and \d+ more missing"
    ):
        Progress.from_json(value)


def test_entries_of_a_later_program_are_ignored() -> None:
    assert Record.from_json({**make_record().to_json(), "later": 1}, PATH) == make_record()


def test_progress_counts_steps_samples_tokens_and_skips() -> None:
    progress = Progress().after(8, 128).after(8, 128).counted(is_skipped=True, is_bad=False)
    assert progress == Progress(step=2, consumed_samples=16, consumed_tokens=256, skipped_steps=1)
