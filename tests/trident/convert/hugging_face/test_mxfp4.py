"""Weights in MXFP4 are read as transformers reads them, to the bit, and a quantized gpt-oss is imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron.errors import ConversionError
from tests.trident.convert.tiny_models import build_tiny_model, write_tokenizer
from trident.convert.hugging_face.importing import ModelImportRequest, import_model
from trident.convert.hugging_face.mxfp4 import with_decoded_blocks
from trident.convert.hugging_face.table.tensors import BoundPart
from trident.convert.hugging_face.weight_files import SINGLE_FILE, read_weight_files

MATRICES, OUTPUTS, GROUPS = 3, 10, 2
STORED = "model.layers.0.mlp.experts.down_proj"


def packed(shape: tuple[int, ...], spread: int, seed: int) -> dict[str, torch.Tensor]:
    """Random blocks, and scales of at most 2^spread and at least 2^-spread."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(127 - spread, 128 + spread, shape, generator=generator)
    return {
        "_blocks": torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8),
        "_scales": scales.to(torch.uint8),
    }


def test_every_box_is_that_of_transformers(tmp_path: Path) -> None:
    halves = packed((MATRICES, OUTPUTS, GROUPS), 120, 1)
    save_file({STORED + ending: tensor for ending, tensor in halves.items()}, tmp_path / SINGLE_FILE)
    expected = convert_moe_packed_tensors(halves["_blocks"], halves["_scales"])  # [matrices, input, output]
    tensors = with_decoded_blocks(read_weight_files(tmp_path))
    tensor = tensors[STORED]
    assert list(tensors) == [STORED] and tensor.dtype == "BF16"
    assert tensor.shape == tuple(expected.shape) == (MATRICES, 32 * GROUPS, OUTPUTS)
    ours = (MATRICES, 2, OUTPUTS // 2, 32 * GROUPS)  # with the gate beside up in each column of theirs
    pairs = BoundPart(STORED, (0, 0, 0, 0), ours, (0, 3, 2, 1), 2, 0, is_stack=True)
    start, stop = (1, 3, 0, 1), (3, 40, 4, 2)
    box = tuple(slice(*edges) for edges in zip(start, stop, strict=True))
    found = tensor.read_box(pairs, start, stop)
    assert torch.equal(found, expected.unflatten(2, (OUTPUTS // 2, 2))[box])


def test_a_quantized_model_is_imported(tmp_path: Path) -> None:
    """The import proves the logits by those of transformers, which dequantizes the model itself."""
    model = build_tiny_model("gpt-oss")
    source, target = tmp_path / "model", tmp_path / "checkpoints"
    config = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "layer_types": None}
    model = type(model)(type(model.config)(**{**model.config.to_dict(), **config})).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    model.save_pretrained(source)
    write_tokenizer(source)
    weights = load_file(source / SINGLE_FILE)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        matrices, inputs, outputs = weights.pop(name).shape
        halves = packed((matrices, outputs, inputs // 32), 3, len(name))
        halves["_scales"] -= 4
        weights |= {name + ending: tensor for ending, tensor in halves.items()}
    save_file(weights, source / SINGLE_FILE, {"format": "pt"})
    described = json.loads((source / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (source / "config.json").write_text(json.dumps(described))
    import_model(ModelImportRequest(source, target))
    proof = json.loads((target / "proof.json").read_text())
    assert "quantization" not in json.dumps(proof) and (target / "model.yaml").exists()


@pytest.mark.parametrize("shape", [(3, 10), (3, 10, 3)])
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    halves = packed((MATRICES, OUTPUTS, GROUPS), 3, 1)
    halves["_scales"] = torch.zeros(shape, dtype=torch.uint8)
    save_file({STORED + ending: tensor for ending, tensor in halves.items()}, tmp_path / SINGLE_FILE)
    with pytest.raises(ConversionError, match=r"down_proj_blocks is U8 \[3, 10, 2, 16\] and .*Mxfp4Config\(dequantize"):
        with_decoded_blocks(read_weight_files(tmp_path))
