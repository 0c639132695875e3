"""Megatron-LM's torch layout has its files, keys and shapes, and everything comes back from it bit by bit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import read_tensors
from megatron.checkpoint.recovery import OpenCheckpoint
from megatron.errors import ConfigError, ConversionError
from tests.trident.convert.megatron_output.networks import BLOOM, GPT2, LLAMA, check_comes_back, write_network
from tools.convert import export_megatron, import_megatron
from trident.checkpoints.differences import compare
from trident.convert.megatron_output.torch_output import write_torch_layout


def read(path: Path) -> dict[str, Any]:
    """A file as the other program reads it."""
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize(
    ("flags", "naming", "ranks", "stages"),
    [
        (GPT2, "classic", 1, 1),
        (GPT2, "classic", 2, 2),
        (LLAMA, "classic", 2, 2),
        (LLAMA, "core", 2, 2),
        (f"{GPT2} --position-embedding-type none", "core", 1, 2),
    ],
)
def test_it_comes_back_bit_by_bit(flags: str, naming: str, ranks: int, stages: int, tmp_path: Path) -> None:
    written = write_network(tmp_path, flags)
    write_torch_layout(written.request(tmp_path / "out", naming, ranks, stages))
    check_comes_back(written, tmp_path / "out", moments=naming == "classic")


def test_a_checkpoint_of_ours_comes_back_through_both_programs(tmp_path: Path) -> None:
    written = write_network(tmp_path, f"{GPT2} --bf16")
    words = ["--load", str(written.checkpoint.folder.parent), "--output", str(tmp_path / "out"), "--format", "torch"]
    words += ["--naming", "classic", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    assert export_megatron.main(words) == 0
    words = [str(tmp_path / "out"), "--save", str(tmp_path / "again"), *written.tokenizer]
    assert import_megatron.main(words) == 0
    comparison = compare(written.checkpoint, OpenCheckpoint.newest(tmp_path / "again"), with_moments=True)
    assert comparison.holds_same_tensors and not comparison.progress
    sections = ("model.", "optim.", "precision.")
    assert not [change.field for change in comparison.config if change.field.startswith(sections)]
    with pytest.raises(
        ConfigError, match="--naming bigscience cannot be combined with --format torch. Use core or classic"
    ):
        export_megatron.main(["--load", "x", "--output", "y", "--format", "torch", "--naming", "bigscience"])
    with pytest.raises(ConfigError, match="--keep-padding cannot be combined with --format torch"):
        export_megatron.main(["--load", "x", "--output", "y", "--format", "torch", "--keep-padding"])


def test_files_and_keys_of_a_pipeline(tmp_path: Path) -> None:
    written = write_network(tmp_path, f"{GPT2} --bf16")
    folder = write_torch_layout(written.request(tmp_path / "out", "classic", 2, 2))
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert sorted(path.name for path in folder.iterdir()) == [f"mp_rank_{t}_{p}" for t in ("00", "01") for p in
                                                             ("000", "001")]  # fmt: skip
    first, last = (read(folder / f"mp_rank_01_00{stage}" / "model_optim_rng.pt") for stage in (0, 1))
    assert isinstance(first["args"], argparse.Namespace)
    assert (first["checkpoint_version"], first["iteration"], first["tokens"]) == (3.0, 4, 320)
    assert first["args"].consumed_train_samples == 32 and first["args"].tensor_model_parallel_size == 2
    embedding = first["model"]["language_model"]["embedding"]
    assert embedding["word_embeddings"]["weight"].shape == (384, 32)  # half of 768 padded rows
    assert embedding["word_embeddings"]["weight"].dtype == torch.bfloat16
    assert not embedding["word_embeddings"]["weight"][600 - 384 :].any()
    assert embedding["position_embeddings"]["weight"].shape == (16, 32)
    blocks = first["model"]["language_model"]["encoder"]
    shapes = {
        name.removeprefix("layers.0."): list(t.shape) for name, t in blocks.items() if name.startswith("layers.0.")
    }
    assert shapes == {
        "input_layernorm.weight": [32], "input_layernorm.bias": [32],
        "self_attention.query_key_value.weight": [48, 32], "self_attention.query_key_value.bias": [48],
        "self_attention.dense.weight": [32, 16], "self_attention.dense.bias": [32],
        "post_attention_layernorm.weight": [32], "post_attention_layernorm.bias": [32],
        "mlp.dense_h_to_4h.weight": [64, 32], "mlp.dense_h_to_4h.bias": [64],
        "mlp.dense_4h_to_h.weight": [32, 64], "mlp.dense_4h_to_h.bias": [32],
    }  # fmt: skip
    assert "final_layernorm.weight" not in blocks
    assert "final_layernorm.bias" in last["model"]["language_model"]["encoder"]
    assert torch.equal(last["model"]["word_embeddings_for_head"]["weight"], embedding["word_embeddings"]["weight"])
    optimizer = first["optimizer"]
    assert [len(group["params"]) for group in optimizer["optimizer"]["param_groups"]] == [6, 8]
    assert optimizer["optimizer"]["param_groups"][1]["weight_decay"] == 0
    master = optimizer["fp32_from_fp16_params"][0][0]
    assert master.dtype == torch.float32
    assert torch.equal(master.bfloat16(), embedding["word_embeddings"]["weight"])
    assert first["opt_param_scheduler"]["num_steps"] == 32


def test_rows_are_in_the_order_of_the_format(tmp_path: Path) -> None:
    written = write_network(tmp_path, LLAMA, moments=False, step=0)
    folder = write_torch_layout(written.request(tmp_path / "out", "core", 2, 1))
    assert folder.name == (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    models = [read(folder / f"mp_rank_0{rank}" / "model_optim_rng.pt") for rank in (0, 1)]
    assert "optimizer" not in models[0] and models[0]["args"].swiglu
    ours = dict(read_tensors(written.checkpoint.folder))
    block = "decoder.layers.1."
    gate_and_up = ours[f"{block}mlp.linear_fc1.weight"]
    fused = ours[f"{block}self_attention.linear_qkv.weight"]  # [2, 4, 8, 32]: groups of 2 queries, key, value
    for rank, content in enumerate(models):
        network = content["model"]
        half = slice(24 * rank, 24 * rank + 24)
        assert torch.equal(
            network[f"{block}mlp.linear_fc1.weight"], torch.cat([gate_and_up[0, half], gate_and_up[1, half]])
        )
        assert torch.equal(network[f"{block}self_attention.linear_qkv.weight"], fused[rank].reshape(32, 32))
        assert network["output_layer.weight"].shape == (384, 32)
        assert network[f"{block}self_attention.q_layernorm.weight"].shape == (8,)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    bloom = write_network(tmp_path, BLOOM)
    with pytest.raises(ConversionError, match="position_embedding_type = 'alibi', which this program cannot express"):
        write_torch_layout(bloom.request(tmp_path / "out", "core"))
    llama = write_network(tmp_path / "llama", LLAMA)
    with pytest.raises(ConversionError, match="2 groups of keys and values .* --tensor-model-parallel-size 4"):
        write_torch_layout(llama.request(tmp_path / "out", "core", 4))
    with pytest.raises(ConversionError, match=r"2 layers cannot be divided into 3 equal stages"):
        write_torch_layout(llama.request(tmp_path / "out", "core", 1, 3))
    with pytest.raises(ConversionError, match="4 attention heads cannot be split over 3 ranks"):
        write_torch_layout(llama.request(tmp_path / "out", "core", 3))
    (tmp_path / "there").mkdir()
    with pytest.raises(ConversionError, match="there already exists"):
        write_torch_layout(llama.request(tmp_path / "there", "core"))
    assert not (tmp_path / "out").exists()
