"""Checkpoints that other programs write are opened as what they are, and every tensor comes out as it went in."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.errors import ConversionError
from tests.trident.convert.foreign.foreign_files import (
    VOCABULARY,
    PositionEmbeddingType,
    check_equal,
    foreign,
    gpt2_arguments,
    save,
    write_pipeline,
    write_torch_layout,
    write_universal,
)
from trident.convert.foreign import newest_folder, open_foreign
from trident.convert.megatron_format.foreign_model import ForeignPieces
from trident.convert.megatron_format.sharding_rules import tensor_rules
from trident.convert.megatron_format.torch_files import ImportOptions

CHOICES = ImportOptions(VOCABULARY)
NVIDIA = {
    "transformer_impl": "local", "group_query_attention": True, "num_query_groups": 2, "swiglu": True,
    "ffn_hidden_size": 64, "normalization": "RMSNorm", "norm_epsilon": 1e-6, "add_bias_linear": False,
    "position_embedding_type": "rope", "rotary_base": 500000, "untie_embeddings_and_output_weights": True,
    "qk_layernorm": True,
}  # fmt: skip


def nvidia_arguments(**changes: Any) -> argparse.Namespace:
    """The arguments of a small run of NVIDIA's program."""
    arguments = gpt2_arguments(**{**NVIDIA, **changes})
    for name in ("glu_activation", "deepspeed", "embed_layernorm"):
        delattr(arguments, name)
    return arguments


def bloom_arguments(**changes: Any) -> argparse.Namespace:
    """The arguments of a small BLOOM."""
    return gpt2_arguments(position_embedding_type=PositionEmbeddingType.alibi, embed_layernorm=True, **changes)


@pytest.mark.parametrize(
    ("arguments", "how"),
    [
        (gpt2_arguments(), {"version": 0}),
        (gpt2_arguments(), {"version": 1.0, "ranks": 2}),
        (gpt2_arguments(), {"version": 2.0, "ranks": 2, "stages": 2}),
        (bloom_arguments(), {"version": 3.0, "ranks": 2}),
        (gpt2_arguments(glu_activation="geglu"), {"ranks": 2, "gate_last": True}),
        (nvidia_arguments(), {"ranks": 2, "stages": 2, "core_names": True}),
    ],
    ids=["version 0", "version 1", "version 2", "bloom", "geglu", "core"],
)
def test_the_torch_layout(arguments: argparse.Namespace, how: dict[str, Any], tmp_path: Path) -> None:
    written = foreign(arguments, **how)
    opened = open_foreign(write_torch_layout(tmp_path, written), CHOICES)
    assert opened.format == "Megatron-LM (torch)"
    assert opened.model == written.config
    check_equal(opened, written, moments=True)
    progress = opened.state.progress
    assert (progress.step, progress.consumed_samples, opened.state.updates) == (3, 12, 3)
    assert opened.state.flags["adam_beta2"] == 0.95 and opened.state.flags["train_iters"] == 8


@pytest.mark.parametrize("bigscience", [True, False])
def test_layer_files_of_a_pipeline(bigscience: bool, tmp_path: Path) -> None:
    arguments = bloom_arguments() if bigscience else gpt2_arguments()
    if not bigscience:
        for name in ("glu_activation", "position_embedding_type"):
            delattr(arguments, name)
    written = foreign(arguments, ranks=2, stages=2)
    opened = open_foreign(write_pipeline(tmp_path, written, bigscience=bigscience), CHOICES)
    assert opened.format == "DeepSpeed" and opened.model == written.config
    check_equal(opened, written, moments=False)
    assert "only weights" in opened.notes[0]


@pytest.mark.parametrize("first_version", [True, False])
def test_universal_checkpoints(first_version: bool, tmp_path: Path) -> None:
    written = foreign(gpt2_arguments(glu_activation="swiglu"), ranks=2, gate_last=True)
    opened = open_foreign(write_universal(tmp_path, written, first_version=first_version), CHOICES)
    check_equal(opened, written, moments=True)
    assert len(opened.notes) == int(first_version)


def test_weights_that_ranks_hold_alike_must_be_equal_or_are_averaged(tmp_path: Path) -> None:
    written = foreign(bloom_arguments(num_layers=1), ranks=2)
    folder = write_torch_layout(tmp_path, written, with_optimizer=False)
    path = folder / "iter_0000003" / "mp_rank_01" / "model_optim_rng.pt"
    norm = written.tensors["weight"]["decoder.final_layernorm.weight"]
    norm += 0.5
    drifted = write_torch_layout(tmp_path / "drifted", written, with_optimizer=False)
    (drifted / "iter_0000003" / "mp_rank_01" / "model_optim_rng.pt").replace(path)
    opened = open_foreign(folder, CHOICES)
    rule = tensor_rules(opened.model)["decoder.final_layernorm.weight"]
    with pytest.raises(ConversionError, match=r"decoder.final_layernorm.weight .*largest difference is 0\.5"):
        ForeignPieces(opened).tensor(rule, "weight")
    averaged = ForeignPieces(opened, average=True).tensor(rule, "weight")
    assert torch.allclose(averaged, norm - 0.25, rtol=0, atol=1e-6)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    written = foreign(gpt2_arguments(num_layers=1))
    del written.tensors["weight"]["decoder.layers.0.mlp.linear_fc2.bias"]
    opened = open_foreign(write_torch_layout(tmp_path / "missing", written, with_optimizer=False), CHOICES)
    with pytest.raises(ConversionError, match=r"missing: decoder\.layers\.0\.mlp\.linear_fc2\.bias"):
        opened.check()
    written = foreign(gpt2_arguments(num_layers=1))
    written.tensors["weight"]["decoder.layers.0.mlp.gate.weight"] = torch.zeros(2)
    with pytest.raises(
        ConversionError, match=r"do not belong to a GPT: language_model.encoder.layers.0.mlp.gate.weight"
    ):
        open_foreign(write_torch_layout(tmp_path / "unknown", written, with_optimizer=False), CHOICES)
    written = foreign(gpt2_arguments(num_layers=1))
    written.stored.hidden_size = 64
    written.stored.kv_channels = 16
    opened = open_foreign(write_torch_layout(tmp_path / "shape", written, with_optimizer=False), CHOICES)
    with pytest.raises(ConversionError, match=r"has shape \[32\], not \[64\]"):
        opened.check()


def test_groups_that_ranks_cannot_divide_are_refused(tmp_path: Path) -> None:
    written = foreign(nvidia_arguments(num_layers=1), ranks=2, core_names=True)
    folder = write_torch_layout(tmp_path, written, with_optimizer=False)
    for rank in range(2):
        path = folder / "iter_0000003" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        content = torch.load(path, weights_only=False)
        content["args"].num_query_groups = 1
        save(content, path)
    opened = open_foreign(folder, CHOICES)
    with pytest.raises(ConversionError, match="linear_qkv.weight has 1 blocks, which cannot be divided over 2"):
        opened.check()


def test_incomplete_folders_are_named(tmp_path: Path) -> None:
    written = foreign(gpt2_arguments(num_layers=2), ranks=2, stages=2)
    folder = write_torch_layout(tmp_path, written) / "iter_0000003"
    (folder / "mp_rank_01_001" / "model_optim_rng.pt").rename(folder / "kept.pt")
    with pytest.raises(ConversionError, match=r"mp_rank_01_001 holds no model_optim_rng\.pt"):
        open_foreign(folder, CHOICES)
    (folder / "mp_rank_01_001").rmdir()
    with pytest.raises(ConversionError, match="files of 3 ranks; 2 tensor-parallel ranks and 2 stages make 4"):
        open_foreign(folder, CHOICES)
    (folder / "mp_rank_00_000_003").mkdir()
    with pytest.raises(ConversionError, match="mp_rank_00_000_003 has an unknown layout"):
        open_foreign(folder, CHOICES)


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="nowhere is not a directory"):
        newest_folder(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConversionError, match=r"it contains notes\.txt"):
        open_foreign(tmp_path, CHOICES)
    (tmp_path / "latest").write_text("../../etc")
    with pytest.raises(ConversionError, match=r"names '../../etc'"):
        open_foreign(tmp_path, CHOICES)


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    save([1], path)
    with pytest.raises(ConversionError, match="does not hold a dictionary"):
        open_foreign(tmp_path, CHOICES)
    save({"model": {}}, path)
    with pytest.raises(ConversionError, match="holds no arguments of the run"):
        open_foreign(tmp_path, CHOICES)
    folder = tmp_path / "engine"
    save([1], folder / "mp_rank_00_model_states.pt")
    with pytest.raises(ConversionError, match="mp_rank_00_model_states.pt does not hold a dictionary"):
        open_foreign(folder, CHOICES)
    (folder / "mp_rank_00_model_states.pt").rename(folder / "mp_rank_02_model_states.pt")
    with pytest.raises(ConversionError, match="model files of ranks 2;"):
        open_foreign(folder, CHOICES)
    save({}, folder / "layer_01_expert_0_mp_rank_00_model_states.pt")
    with pytest.raises(ConversionError, match="holds experts"):
        open_foreign(folder, CHOICES)
