"""What is written is checked against the network, and each rank's part is read alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import read_tensors
from megatron.errors import ConversionError
from tests.trident.convert.megatron_output.networks import GPT2, write_network
from trident.convert.megatron_output.output_tensors import CheckpointTensors


def test_ranks_of_padding_only(tmp_path: Path) -> None:
    written = write_network(tmp_path, GPT2)
    request = written.request(tmp_path / "out", "classic", ranks=4)
    request = dataclasses.replace(request, model=dataclasses.replace(request.model, padded_vocab_size=2400))
    tensors = CheckpointTensors.of(request)
    name = "embedding.word_embeddings.weight"
    parts = [tensors.part(name, "weight", request.order, rank, 4, 2400) for rank in range(4)]
    assert torch.equal(parts[0], dict(read_tensors(written.checkpoint.folder, [name]))[name])
    assert all(part.shape == (600, 32) and not part.any() for part in parts[1:])


def test_the_state_of_a_schedule_free_optimizer_is_not_taken_for_moments(tmp_path: Path) -> None:
    for flags, has_moments in ((GPT2, True), (f"{GPT2} --optimizer schedule-free --lr-decay-style constant", False)):
        (folder := tmp_path / str(has_moments)).mkdir()
        request = write_network(folder, flags).request(folder / "out", "classic")
        assert CheckpointTensors.of(request).has_moments is has_moments


def test_a_network_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    written = write_network(tmp_path, GPT2)
    request = written.request(tmp_path / "out", "classic", ranks=2)
    odd = dataclasses.replace(request, model=dataclasses.replace(request.model, padded_vocab_size=601))
    with pytest.raises(ConversionError, match="601 rows of the padded vocabulary cannot be split over .* 2"):
        CheckpointTensors.of(odd)
    deeper = dataclasses.replace(request, model=dataclasses.replace(request.model, num_layers=3))
    with pytest.raises(ConversionError, match=r"does not hold the tensors of its own network: decoder.layers.2"):
        CheckpointTensors.of(deeper)
