"""Opening a checkpoint: what comes with its network, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.errors import CheckpointError, ConfigError
from megatron.inference.loading import open_checkpoint
from megatron.parallel.mesh import ParallelMesh
from tests.inference.checkpoints import POSITIONS, make_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def test_a_checkpoint_brings_its_network_tokenizer_and_step(checkpoints: Path) -> None:
    loaded = open_checkpoint(str(checkpoints), {}, ParallelMesh.single())
    assert (loaded.step, loaded.positions) == (3, POSITIONS)
    assert loaded.vocab_size == loaded.tokenizer.vocab_size
    assert loaded.eod_id == loaded.tokenizer.eod_id
    assert not loaded.model.training
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}


def test_a_flag_may_choose_the_dtype_but_not_the_network(checkpoints: Path) -> None:
    loaded = open_checkpoint(str(checkpoints), {"precision.bf16": True}, ParallelMesh.single())
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match="--num-layers 7 is given, but the checkpoint holds a network with 2"):
        open_checkpoint(str(checkpoints), {"model.num_layers": 7}, ParallelMesh.single())


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    checkpoints = make_checkpoint(tmp_path, "--objective", "masked", "--bidirectional")
    message = r"iter_0000003 holds an encoder \(--bidirectional, --objective masked\): it predicts masked tokens"
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(str(checkpoints), {}, ParallelMesh.single())


def test_a_folder_without_checkpoints_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"there is no checkpoint in {tmp_path}"):
        open_checkpoint(str(tmp_path), {}, ParallelMesh.single())
