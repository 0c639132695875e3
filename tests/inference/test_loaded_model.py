"""Opening a checkpoint: what comes with its network, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.errors import CheckpointError, ConfigError
from megatron.inference import loaded_model
from megatron.inference.generation import GenerationEngine, Request
from megatron.inference.loaded_model import open_checkpoint, pack_weights
from megatron.inference.sampling import Sampling
from megatron.kernels import products
from megatron.model.blocks.embedding import OutputHead
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.architectures import ARCHITECTURES
from tests.inference.checkpoints import POSITIONS, make_checkpoint
from tests.inference.networks import GREEDY, load, mixed_requests


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
    with pytest.raises(ConfigError, match="--num-layers 7 contradicts the checkpoint, whose network has 2"):
        open_checkpoint(str(checkpoints), {"model.num_layers": 7}, ParallelMesh.single())


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    checkpoints = make_checkpoint(tmp_path, "--objective", "masked", "--bidirectional")
    message = r"iter_0000003 holds an encoder \(--bidirectional, --objective masked\), which predicts masked tokens"
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(str(checkpoints), {}, ParallelMesh.single())


def test_a_folder_without_checkpoints_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"there is no checkpoint in {tmp_path}"):
        open_checkpoint(str(tmp_path), {}, ParallelMesh.single())


@pytest.fixture(autouse=True)
def _small_matrices_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not products._has_packing():
        pytest.skip("this torch does not pack matrices")
    monkeypatch.setattr(products, "SMALLEST_PACKED", 1)


def _texts(loaded: Any, requests: Sequence[Request]) -> dict[str, list[int | None]]:
    engine = GenerationEngine(loaded)
    found: dict[str, list[int | None]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while not engine.is_idle:
        for one in engine.step():
            found[one.request_id].append(one.token)
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_networks_write_the_same_texts(name: str) -> None:
    loaded = load(ARCHITECTURES[name])
    sampled = Sampling(temperature=0.9, seed=3)
    requests = [
        dataclasses.replace(request, sampling=GREEDY if number % 2 else sampled)
        for number, request in enumerate(mixed_requests(6, longest=9, new_tokens=5))
    ]
    before = _texts(loaded, requests)
    pack_weights(loaded.model)
    assert any(weight.is_mkldnn for weight in loaded.model.parameters())
    assert _texts(loaded, requests) == before


def test_only_a_shared_head_keeps_its_plain_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, is_packed in ((1 << 40, True), (0, False), (None, True)):
        monkeypatch.setattr(loaded_model, "available_memory_bytes", lambda free=free: free)
        tied = load().model
        pack_weights(tied)
        head = next(module for module in tied.modules() if isinstance(module, OutputHead))
        assert head.weight is not None and not head.weight.is_mkldnn and (head.packed is not None) == is_packed
    own = load(ARCHITECTURES["llama"]).model
    pack_weights(own)
    head = next(module for module in own.modules() if isinstance(module, OutputHead))
    assert isinstance(head.weight, torch.Tensor) and head.weight.is_mkldnn and head.packed is None
