"""Values move slice by slice, whatever the slices; weights that do not fit the configuration are named."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.manifest import read_manifest
from megatron.errors import CheckpointError, ConversionError
from tests.helpers.networks import tiny_config
from tests.inference.checkpoints import make_checkpoint
from trident.convert.hugging_face import streaming
from trident.convert.hugging_face.registry import family_of
from trident.convert.hugging_face.streaming import (
    CheckpointSource,
    ImportedPieces,
    check_weights,
    network_shapes,
    slices,
    with_table_names,
    without_copies,
)
from trident.convert.hugging_face.table.tensors import BoundTensor, bind
from trident.convert.hugging_face.weight_files import SINGLE_FILE, FileTensor, read_json_file, read_weight_files

TinyModel = Callable[[str], Path]


def opened(folder: Path) -> tuple[list[BoundTensor], dict[str, FileTensor]]:
    config = read_json_file(folder / "config.json", "")
    family = family_of(config)
    return bind(family.tensors, network_shapes(family.read_config(config))), read_weight_files(folder)


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi3", "mixtral"])
def test_small_slices_give_the_same_values(tiny_model: TinyModel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, stored = opened(tiny_model(name))
    whole = {key.name: values for key, values in ImportedPieces(tensors, stored)}
    monkeypatch.setattr(streaming, "SLICE_BYTES", 600)
    cut: dict[str, list[torch.Tensor]] = {}
    for key, values in (pieces := ImportedPieces(tensors, stored)):
        assert key.numel == len(values) and 4 * key.numel <= max(600, 4 * key.shape[-1])
        cut.setdefault(key.name, []).append(values)
    assert {name: torch.cat(parts).tolist() for name, parts in cut.items()} == {
        name: values.tolist() for name, values in whole.items()
    }
    assert [key for key, _ in pieces.snapshot().listed] == [key for key, _ in pieces]


def changed(
    folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
) -> Path:
    """A copy of a model directory with other tensors."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(dict(change(load_file(folder / SINGLE_FILE))), target / SINGLE_FILE)
    return target


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda stored: {k: v for k, v in stored.items() if k != "model.norm.weight"}, "missing: model.norm.weight"),
        (lambda stored: {**stored, "model.extra": torch.ones(2)}, "unexpected: model.extra"),
        (
            lambda stored: {**stored, "model.norm.weight": torch.ones(7)},
            r"of another shape: model.norm.weight has shape \[7\], not \[48\]",
        ),
        (
            lambda stored: {**stored, "model.norm.weight": torch.ones(48, dtype=torch.int32)},
            "of another type: model.norm.weight has element type I32",
        ),
        (
            lambda stored: {
                **stored,
                "model.layers.0.self_attn.k_proj.weight": stored["model.layers.0.self_attn.k_proj.weight"].bfloat16(),
            },
            "of another type: decoder.layers.0.self_attention.linear_qkv.weight would be made of BF16 and F32",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(
    tiny_model: TinyModel,
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    says: str,
) -> None:
    folder = changed(tiny_model("llama"), tmp_path / "changed", change)
    tensors, stored = opened(folder)
    with pytest.raises(ConversionError, match=f"config.json describes as llama. Tensors .*{says}"):
        check_weights(family_of({"model_type": "llama"}), tensors, stored)


def test_many_names_are_cut_short(tiny_model: TinyModel) -> None:
    tensors, _ = opened(tiny_model("llama"))
    with pytest.raises(ConversionError, match="missing: .* and 22 more"):
        check_weights(family_of({"model_type": "llama"}), tensors, {})


def test_buffers_are_ignored(tiny_model: TinyModel, tmp_path: Path) -> None:
    buffer = {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8)}
    tensors, stored = opened(changed(tiny_model("gpt2"), tmp_path / "changed", lambda stored: {**stored, **buffer}))
    check_weights(family_of({"model_type": "gpt2"}), tensors, stored)


def test_names_without_the_prefix_are_completed(tiny_model: TinyModel, tmp_path: Path) -> None:
    family = family_of({"model_type": "gpt2"})
    stored = read_weight_files(tiny_model("gpt2"))
    bare = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    assert with_table_names(family, bare).keys() == stored.keys()
    assert with_table_names(family, stored) == stored


def test_a_tied_head_is_accepted_if_it_is_the_embedding(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "SLICE_BYTES", 500)
    family, folder = family_of({"model_type": "gpt2"}), tiny_model("gpt2")
    embedding = load_file(folder / SINGLE_FILE)["transformer.wte.weight"]
    with_copy = changed(folder, tmp_path / "copy", lambda stored: {**stored, "lm_head.weight": embedding.clone()})
    stored = read_weight_files(with_copy)
    assert without_copies(family, stored, is_tied=True).keys() == stored.keys() - {"lm_head.weight"}
    other = embedding.clone()
    other[-1, -1] += 1
    with_other = changed(folder, tmp_path / "other", lambda stored: {**stored, "lm_head.weight": other})
    with pytest.raises(
        ConversionError, match='lm_head.weight differs from transformer.wte.weight.*"tie_word_embeddings"'
    ):
        without_copies(family, read_weight_files(with_other), is_tied=True)


def test_older_names_and_second_copies_of_encoders(tmp_path: Path) -> None:
    family = family_of({"model_type": "bert"})
    bias = torch.arange(5.0)
    norms = {f"bert.embeddings.LayerNorm.{name}": torch.ones(5) for name in ("gamma", "beta")}
    biases = {"cls.predictions.bias": bias, "cls.predictions.decoder.bias": bias.clone()}
    save_file({**norms, **biases}, tmp_path / SINGLE_FILE)
    stored = with_table_names(family, read_weight_files(tmp_path))
    norm = {"bert.embeddings.LayerNorm.weight", "bert.embeddings.LayerNorm.bias"}
    assert without_copies(family, stored, is_tied=True).keys() == {*norm, "cls.predictions.bias"}
    save_file({**biases, "cls.predictions.decoder.bias": bias + 1}, tmp_path / SINGLE_FILE)
    with pytest.raises(ConversionError, match=r"cls.predictions.decoder.bias must be a copy of cls.predictions.bias"):
        without_copies(family, read_weight_files(tmp_path), is_tied=True)


def test_a_checkpoint_without_a_tensor_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path) / "iter_0000003"
    source = CheckpointSource(folder, read_manifest(folder))
    assert source.dtype_of("decoder.final_layernorm.weight") == "F32"
    with pytest.raises(CheckpointError, match="tensor decoder.nowhere is not in .*iter_0000003, which holds 28"):
        source.dtype_of("decoder.nowhere")


def test_a_box_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path) / "iter_0000003"
    source = CheckpointSource(folder, read_manifest(folder))
    name, shape = "decoder.layers.0.mlp.linear_fc1.weight", (128, 32)
    whole = source.read(name, shape, ((0, 0), shape))
    assert torch.equal(source.read(name, shape, ((3, 5), (9, 32))), whole[3:9, 5:])


@pytest.mark.parametrize("limit_bytes", [1, 8, 100, 400, 10**9])
@pytest.mark.parametrize("shape", [(7,), (5, 6), (1, 8, 3), (3, 2, 4, 5)])
def test_slices_are_consecutive_and_small(shape: tuple[int, ...], limit_bytes: int) -> None:
    done = 0
    for start, stop in slices(shape, 2, limit_bytes):
        size = [high - low for low, high in zip(start, stop, strict=True)]
        first = sum(index * math.prod(shape[place + 1 :]) for place, index in enumerate(start))
        last = sum((index - 1) * math.prod(shape[place + 1 :]) for place, index in enumerate(stop))
        assert first == done and last + 1 == done + math.prod(size), "each is a range of elements, in order"
        assert 2 * math.prod(size) <= max(limit_bytes, 2 * (shape[-1] if len(shape) > 1 else 1))
        done += math.prod(size)
    assert done == math.prod(shape)


@pytest.mark.parametrize("shape", [(), (0,), (128, 0), (0, 2**50, 2**50)])
def test_a_tensor_without_elements_and_a_scalar_are_one_slice(shape: tuple[int, ...]) -> None:
    assert list(slices(shape, 2, 100)) == [((0,) * len(shape), shape)]


def test_shapes_are_logical_and_nothing_is_allocated() -> None:
    config = dataclasses.replace(tiny_config(), hidden_size=2**20, kv_channels=2**18)  # 8 TB a block
    shapes = network_shapes(config)
    assert shapes["decoder.layers.1.self_attention.linear_qkv.weight"] == (4, 3, 2**18, 2**20)
    assert shapes["embedding.word_embeddings.weight"] == (101, 2**20), "without padding"
    assert "output_layer.weight" not in shapes, "it is tied"
