"""Files as older programs published them: names without prefix, stored buffers, a copy of the tied head."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, GptOssConfig, Olmo3Config, SmolLM3Config

from megatron.errors import ConversionError
from tests.trident.convert.comparison import equal_weights, export, load_network, load_reference, logits_of, relative
from tests.trident.convert.hugging_face.families.published import PUBLISHED
from tests.trident.convert.tiny_models import END, TINY_MODELS, TOKENS, randomize, sample_tokens, write_tokenizer
from trident.convert.hugging_face.importing import ModelImportRequest, import_model

Tensors = Mapping[str, torch.Tensor]


def gpt2(tensors: Tensors) -> dict[str, torch.Tensor]:
    mask = torch.ones(1, 1, 64, 64).tril()
    buffers = {f"h.{layer}.attn.bias": mask.clone() for layer in range(3)}
    buffers |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(3)}
    plain = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    return plain | buffers | {"lm_head.weight": plain["wte.weight"].clone()}


def gpt_neox(tensors: Tensors) -> dict[str, torch.Tensor]:
    buffers = {}
    for layer in range(3):
        place = f"gpt_neox.layers.{layer}.attention"
        buffers[f"{place}.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
        buffers[f"{place}.masked_bias"] = torch.tensor(-1e9)
        buffers[f"{place}.rotary_emb.inv_freq"] = torch.ones(2)
    return dict(tensors) | buffers


def bloom(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name.removeprefix("transformer."): value for name, value in tensors.items()}


def llama(tensors: Tensors) -> dict[str, torch.Tensor]:
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(6) for layer in range(3)}
    return dict(tensors) | frequencies


def rewritten(source: Path, target: Path, change: Callable[[Tensors], dict[str, torch.Tensor]]) -> Path:
    """A copy of a model directory with other tensors."""
    shutil.copytree(source, target)
    save_file(change(load_file(source / "model.safetensors")), target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("name", "configuration", "others"),
    [
        ("gpt-oss 120B", GptOssConfig, {"router_aux_loss_coef", "pad_token_id", "eos_token_id"}),
        ("SmolLM3 3B", SmolLM3Config, {"max_position_embeddings"}),
        (
            "OLMo 3 7B",
            Olmo3Config,
            {"vocab_size", "max_position_embeddings", "rms_norm_eps", "pad_token_id", "eos_token_id"},
        ),
    ],
)
def test_published_sizes_are_the_defaults_of_transformers(name: str, configuration: type, others: set[str]) -> None:
    """Of the classes whose defaults are a published model; what each publication says otherwise is listed."""
    usual = configuration().to_dict()
    published = {key: value for key, value in PUBLISHED[name].items() if key in usual and not key.startswith("rope_")}
    different = {key for key, value in published.items() if usual[key] != value}
    assert different == {"architectures", *others} and len(published) >= 20


@pytest.mark.parametrize(
    ("name", "change"), [("gpt2", gpt2), ("neox-parallel", gpt_neox), ("bloom-8", bloom), ("llama-yarn", llama)]
)
def test_published_names_are_read(
    name: str,
    change: Callable[[Tensors], dict[str, torch.Tensor]],
    tiny_model: Callable[[str], Path],
    imported_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    source = rewritten(tiny_model(name), tmp_path / "published", change)
    found = import_model(ModelImportRequest(source, tmp_path / "imported"))
    assert equal_weights(load_network(found)[1], load_network(imported_model(name))[1])


def test_a_bias_that_the_family_does_not_have_is_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.bias"
    source = rewritten(tiny_model("llama"), tmp_path / "other", lambda tensors: dict(tensors) | {name: torch.ones(48)})
    with pytest.raises(ConversionError, match=name.replace(".", r"\.")):
        import_model(ModelImportRequest(source, tmp_path / "imported"))


def test_of_a_model_with_images_the_text_part_is_read(tmp_path: Path) -> None:
    vision = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    text = {**TINY_MODELS["gemma3"].fields, "model_type": "gemma3_text", "vocab_size": TOKENS, "pad_token_id": None}
    ids = {"bos_token_id": END, "eos_token_id": END, "boi_token_index": 1, "eoi_token_index": 2, "image_token_index": 3}
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, pad_token_id=None, **ids)
    ).eval()
    randomize(model, seed=4)
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    config, network = load_network(import_model(ModelImportRequest(tmp_path / "model", tmp_path / "imported", None, 3)))
    with torch.no_grad():
        expected = model(sample_tokens()).logits
        assert relative(logits_of(network, sample_tokens(), config), expected) < 1e-5
    exported = export(tmp_path / "imported", tmp_path / "exported")
    assert type(load_reference(exported)[0]).__name__ == "Gemma3ForCausalLM"
