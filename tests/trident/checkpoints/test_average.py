"""The mean of checkpoints holds the mean of their weights, and nothing but weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import read_record, read_tensors
from megatron.checkpoint.record import Record
from megatron.errors import CheckpointError
from megatron.tokenizers.record import TokenizerRecord
from tests.checkpoint.made.fake_pieces import SHAPES, make_state
from tests.checkpoint.made.stored import save_checkpoint
from tests.helpers.networks import tiny_config
from trident.checkpoints import slices
from trident.checkpoints.average import WeightedCheckpoint, average


def test_the_mean_is_weighted_and_of_any_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", 28)
    states = [make_state(seed=seed) for seed in (1, 2, 3)]
    opened = [save_checkpoint(tmp_path / str(seed), state, seed, seed=seed) for seed, state in enumerate(states)]
    shares = [
        WeightedCheckpoint(checkpoint, number) for checkpoint, number in zip(opened, (1.0, 3.0, 4.0), strict=True)
    ]
    made = average(shares, tmp_path / "mean")
    found = dict(read_tensors(made))
    for name in SHAPES:
        one, two, three = (state[name, "master"].double() for state in states)
        assert torch.equal(found[name], (one / 8 + two * 3 / 8 + three / 2).float())
    value = read_record(made)
    record = Record.from_json(value, made)
    assert (record.progress.step, record.has_optimizer_state, record.loss_scale) == (2, False, {})
    assert [entry["coefficient"] for entry in value["averaged"]] == [0.125, 0.375, 0.5]
    assert made.name == "iter_0000002"
    (tmp_path / "mean" / "latest_checkpointed_iteration.txt").rename(tmp_path / "mean" / ".tmp-latest-0a")
    with pytest.raises(CheckpointError, match="mean already holds checkpoints .iter_0000002"):
        average(shares, tmp_path / "mean")
    assert (tmp_path / "mean" / "latest_checkpointed_iteration.txt").read_text() == "2"  # a kill had left it half done
    assert not (tmp_path / "mean" / ".tmp-latest-0a").exists()


def test_equal_weights_stay_as_they_are(tmp_path: Path) -> None:
    narrow = make_state(kinds=("weight",), dtype=torch.bfloat16)
    opened = [save_checkpoint(tmp_path / name, narrow) for name in "abc"]
    found = dict(read_tensors(average([WeightedCheckpoint(checkpoint) for checkpoint in opened], tmp_path / "mean")))
    assert all(torch.equal(found[name], narrow[name, "weight"].float()) for name in SHAPES)


def test_other_networks_are_refused_by_the_fields_that_differ(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path / "first", make_state())
    model = tiny_config()
    deeper = dataclasses.replace(model, num_layers=4, normalization="RMSNorm", padded_vocab_size=256)
    other = save_checkpoint(tmp_path / "other", make_state(), model=deeper)
    with pytest.raises(CheckpointError, match="num_layers is 2 and 4.*normalization is LayerNorm and RMSNorm") as found:
        average([WeightedCheckpoint(first), WeightedCheckpoint(other)], tmp_path / "mean")
    assert "padded_vocab_size" not in str(found.value)
    tokenizer = TokenizerRecord("SentencePiece", "b" * 64, 600)
    other = save_checkpoint(tmp_path / "words", make_state(), tokenizer=tokenizer)
    with pytest.raises(CheckpointError, match="different tokenizers: GPT2BPE with 600 .*SentencePiece with 600"):
        average([WeightedCheckpoint(first), WeightedCheckpoint(other)], tmp_path / "mean")
    other = save_checkpoint(tmp_path / "fewer", make_state({"scale": ()}))
    with pytest.raises(CheckpointError, match=r"different tensors: .*linear_fc2.bias"):
        average([WeightedCheckpoint(first), WeightedCheckpoint(other)], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_an_old_configuration_without_the_flag(tmp_path: Path) -> None:
    config = {"model": dataclasses.asdict(tiny_config())}
    opened = [save_checkpoint(tmp_path / name, make_state(), config=config) for name in "ab"]
    made = average([WeightedCheckpoint(checkpoint) for checkpoint in opened], tmp_path / "mean")
    assert not Record.from_json(read_record(made), made).has_optimizer_state
