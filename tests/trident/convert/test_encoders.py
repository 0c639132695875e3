"""BERT and RoBERTa: imported, exported and taken back, with the numbers of `transformers`, padding included."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import pretrain_bert
from megatron.config import ModelConfig, parse
from megatron.inference.loaded_model import load_weights
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import MaskKind, StepSettings
from megatron.model.networks import network_layers
from tests.trident.convert.comparison import MESH, draw_checkpoint, equal_weights, export, load_network, run_config
from tests.trident.convert.tiny_encoders import TINY_ENCODERS, padded_tokens, write_tiny_encoder
from trident.convert.hugging_face.importing import ModelImportRequest, import_model

TOLERANCE = 1e-5
Outputs = list[torch.Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """The folder of a tiny encoder and that of its checkpoint; made when they are first asked for."""
    made: dict[str, tuple[Path, Path]] = {}

    def folders_of(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            source = write_tiny_encoder(name, folder / "model")
            made[name] = source, import_model(ModelImportRequest(source, folder / "imported"))
        return made[name]

    return folders_of


@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_an_encoder_is_the_same_on_both_sides(
    name: str, models: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    source, imported = models(name)
    model, network = load_network(imported)
    assert relative(ours(network, model), theirs(source)) <= TOLERANCE
    drawn = draw_checkpoint(imported, model, tmp_path / "drawn")
    exported = export(drawn, tmp_path / "exported")
    mine = load_network(drawn)[1]
    assert relative(ours(mine, model), theirs(exported)) <= TOLERANCE
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == [TINY_ENCODERS[name].architecture]
    back = import_model(ModelImportRequest(exported, tmp_path / "back"))
    assert equal_weights(mine, load_network(back)[1])
    proof = json.loads((exported / "proof.json").read_text())
    mask = transformers.AutoTokenizer.from_pretrained(exported).mask_token_id
    assert all(mask in sequence["tokens"] for sequence in proof["sequences"])
    length = len(proof["sequences"][0]["tokens"])
    assert [sequence.get("text_tokens") for sequence in proof["sequences"]] == [
        None, None, length * 3 // 4, length // 2,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("bert-pretraining", {"activation_function": "gelu_tanh"}),
        ("bert-pretraining", {"layernorm_epsilon": 1e-3}),
        ("bert-masked", {"activation_function": "gelu"}),
        ("roberta", {"layernorm_epsilon": 1e-3}),
    ],
)
def test_a_mistake_changes_the_logits(
    name: str, mistake: dict[str, Any], models: Callable[[str], tuple[Path, Path]]
) -> None:
    source, imported = models(name)
    model = dataclasses.replace(run_config(imported).model, **mistake)
    network = LayerStack(network_layers(model, MESH)).eval()
    load_weights(network, imported, MESH)
    assert relative(ours(network, model)[:1], theirs(source)[:1]) > 2e-5


def test_padding_and_token_types_change_the_logits(models: Callable[[str], tuple[Path, Path]]) -> None:
    source, imported = models("bert-pretraining")
    model, network = load_network(imported)
    for forgotten in ("padding", "types"):
        assert relative(ours(network, model, forgotten)[:1], theirs(source)[:1]) > 1e-2, forgotten


def test_the_unused_positions_of_roberta_are_dropped_and_written_as_zeros(
    models: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    source, imported = models("roberta")
    name = "roberta.embeddings.position_embeddings.weight"
    model, network = load_network(imported)
    before = load_file(source / "model.safetensors")[name]
    assert model.max_position_embeddings == len(before) - 2 == 64
    assert torch.equal(dict(network.named_parameters())["embedding.position_embeddings.weight"], before[2:])
    after = load_file(export(imported, tmp_path / "exported") / "model.safetensors")[name]
    assert torch.equal(after[2:], before[2:]) and not after[:2].any() and before[:2].any()


def ours(network: LayerStack, model: ModelConfig, forgotten: str = "") -> Outputs:
    """Our logits of the text, and of the order where the network has that head."""
    tokens, is_text = padded_tokens()
    context = StepSettings(mask=MaskKind.CAUSAL if forgotten == "padding" else MaskKind.DOCUMENTS).context(
        torch.arange(len(tokens)),
        (~is_text).long(),
        token_types=None if forgotten == "types" else types_of(tokens, model.token_types),
    )
    with torch.no_grad():
        found = network(padded(tokens, is_text), context)
    logits, *others = found if isinstance(found, tuple) else (found,)
    return [logits[..., : model.vocab_size][is_text], *others]


def theirs(folder: Path) -> Outputs:
    """What `transformers` computes of the same."""
    config = json.loads((folder / "config.json").read_text())
    model, report = getattr(transformers, config["architectures"][0]).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    tokens, is_text = padded_tokens()
    with torch.no_grad():
        found = model.eval()(
            padded(tokens, is_text),
            attention_mask=is_text.long(),
            token_type_ids=types_of(tokens, config["type_vocab_size"]),
        )
    logits = found.logits if "logits" in found else found.prediction_logits
    order = [found.seq_relationship_logits] if "seq_relationship_logits" in found else []
    return [logits[is_text], *order]


def padded(tokens: torch.Tensor, is_text: torch.Tensor) -> torch.Tensor:
    """The tokens with padding, which is 1 in RoBERTa and may be anything in BERT."""
    return torch.where(is_text, tokens, 1)


def types_of(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """A token type for each token, all of them in each row."""
    return (torch.arange(tokens.shape[1]) % count).expand_as(tokens)


def relative(mine: Outputs, reference: Outputs) -> float:
    """The largest difference as a share of the largest value."""
    assert len(mine) == len(reference)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, reference, strict=True))


def test_the_guides_command_continues_an_imported_encoder(models: Callable[[str], tuple[Path, Path]]) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "hugging_face.md").read_text()
    command = text.partition("## Encoders")[2].partition("```bash\n")[2].partition("```")[0]
    _, imported = models("roberta")
    words = shlex.split(command.replace("\\\n", " ").replace("checkpoints/roberta", str(imported)))
    assert words[:2] == ["python", "pretrain_bert.py"]
    words[words.index("--seq-length") + 1] = "64"
    request = parse(words[2:], program=pretrain_bert.PROGRAM)
    assert (request.model.hidden_size, request.model.sentence_order_head, request.model.token_types) == (48, False, 1)
    assert request.data.tokenizer_type == "PretrainedFromHF"
