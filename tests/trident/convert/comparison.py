"""One model through import, training step, generation, export and back, compared with `transformers` everywhere."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from megatron.checkpoint import newest_record, save
from megatron.checkpoint.record import Record
from megatron.config import LossConfig, ModelConfig, RunConfig
from megatron.inference.generation import Request, generate_all
from megatron.inference.loaded_model import LoadedModel, load_weights
from megatron.inference.sampling import Sampling
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import StepSettings
from megatron.model.networks import network_layers
from megatron.objective.language_model import LanguageModelObjective
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import filling_weights
from megatron.tokenizers.tokenizer import TokenizerChoice
from tests.trident.convert.tiny_models import END, randomize, sample_tokens
from trident.convert.hugging_face.exporting import ExportRequest, export_model
from trident.convert.hugging_face.importing import ModelImportRequest, import_model
from trident.convert.hugging_face.registry import family_of
from trident.convert.hugging_face.streaming import (
    ImportedPieces,
    needed_states,
    network_shapes,
    with_table_names,
    without_copies,
)
from trident.convert.hugging_face.table.tensors import bind
from trident.convert.hugging_face.weight_files import read_weight_files

PROMPT, NEW_TOKENS = 10, 20  # tokens; together longer than every window and every original context
MESH = ParallelMesh.single()


@dataclass(frozen=True)
class Comparison:
    """What was found for one model; differences are relative to the largest logit, or to the loss.

    Attributes:
        import_difference: our network with the imported weights against the model they came from.
        export_difference: `transformers` with weights drawn by us against our network.
        loss_difference: the loss of the first step of continued training.
        gradient_difference: the gradients of that loss, see `gradient_difference`.
        generates_equally: whether greedy generation with a cache gives the same tokens.
        loads_completely: whether `from_pretrained` found every tensor and no other.
        returns_equal: whether what was exported comes back with the same bits.
    """

    import_difference: float
    export_difference: float
    loss_difference: float
    gradient_difference: float
    generates_equally: bool
    loads_completely: bool
    returns_equal: bool


def compare(source: Path, imported: Path, folder: Path) -> Comparison:
    """Compares one model directory.

    Args:
        imported: the checkpoint that was made from it.
        folder: where further checkpoints and the export go.
    """
    tokens = sample_tokens()
    reference = load_reference(source)[0]
    model, network = load_network(imported)
    logits, loss, expected = run_both(network, model, reference, tokens)
    drawn = draw_checkpoint(imported, model, folder / "drawn")
    exported = export(drawn, folder / "exported")
    again, report = load_reference(exported)
    _, mine = load_network(drawn)
    with torch.no_grad():
        export_difference = relative(logits_of(mine, tokens, model), again(tokens).logits)
    back = import_model(ModelImportRequest(exported, folder / "back"))
    return Comparison(
        import_difference=relative(logits.detach(), expected.logits.detach()),
        export_difference=export_difference,
        loss_difference=abs(loss.item() / expected.loss.item() - 1),
        generates_equally=generated(network, model, tokens) == generated_by_transformers(reference, tokens),
        gradient_difference=gradient_difference(network, model, reference, folder / "gradients"),
        loads_completely=not any(report.values()),
        returns_equal=equal_weights(mine, load_network(back)[1]),
    )


def run_both(
    network: LayerStack, model: ModelConfig, reference: PreTrainedModel, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, CausalLMOutput]:
    """Our logits and loss of a step, and what the other side says; both have gradients afterwards."""
    expected = reference(tokens, labels=tokens)
    logits = _run(network, tokens)
    targets = {"labels": tokens.roll(-1, dims=1), "loss_mask": torch.ones(tokens.shape)}
    targets["loss_mask"][:, -1] = 0
    loss = LanguageModelObjective(MESH.tp, model.vocab_size)(logits, targets).loss_sum / targets["loss_mask"].sum()
    for each in (loss, expected.loss):
        each.backward()
    return logits[..., : model.vocab_size], loss, expected


def gradient_difference(network: LayerStack, model: ModelConfig, reference: PreTrainedModel, folder: Path) -> float:
    """The largest difference between both sides' gradients of a parameter, as a share of the largest value in it, or of
    a hundredth of the largest of all: biases of keys have gradients that are nothing but rounding.

    Theirs are mapped to ours as weights are: they take the place of the model's weights, which are lost, and are
    written and read as a model. A parameter of ours without a gradient has an infinite difference.
    """
    for parameter in reference.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    reference.save_pretrained(folder)
    family = family_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    stored = with_table_names(family, read_weight_files(folder))
    stored = without_copies(family, stored, is_tied=not model.untie_embeddings_and_output_weights)
    theirs = {key.name: values for key, values in ImportedPieces(bind(family.tensors, network_shapes(model)), stored)}
    largest = max(float(values.abs().max()) for values in theirs.values())
    differences = []
    for name, parameter in network.named_parameters():
        if parameter.grad is None:
            return math.inf
        known = theirs.pop(name)
        difference = (parameter.grad.view(-1)[: known.numel()] - known).abs().max()
        differences.append(float(difference) / max(float(known.abs().max()), 0.01 * largest))
    assert theirs.keys() == dict(needed_states(network)).keys()
    return max(differences)


def load_reference(folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model as `transformers` loads it, and its report of missing and unexpected tensors."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True, local_files_only=True
    )
    return model.eval(), report


def load_network(checkpoints: Path) -> tuple[ModelConfig, LayerStack]:
    """Our network with the weights of a folder of checkpoints."""
    model = run_config(checkpoints).model
    network = LayerStack(network_layers(model, MESH)).eval()
    load_weights(network, checkpoints, MESH)
    return model, network


def run_config(checkpoints: Path) -> RunConfig:
    """The configuration in a folder of checkpoints."""
    return RunConfig.from_json(_record(checkpoints)[1].config)


def draw_checkpoint(imported: Path, model: ModelConfig, folder: Path) -> Path:
    """A checkpoint of the same architecture with our own initial values, vectors randomized as well."""
    network = LayerStack(network_layers(model, MESH), seed=1)
    randomize(network, seed=2)
    values = dict(_named(network))
    pieces = [(key, values[key.name].detach().view(-1)[: key.numel]) for key, _ in filling_weights(values.values())]
    save(folder, 0, pieces, _record(imported)[1].to_json(), MESH)
    return folder


def export(checkpoints: Path, target: Path, dtype: str | None = None) -> Path:
    """Exports the newest checkpoint of a folder."""
    path, record = _record(checkpoints)
    config = RunConfig.from_json(record.config)
    tokenizer = TokenizerChoice.of(config.data)
    return export_model(ExportRequest(path, target, config.model, tokenizer, record.tokenizer, dtype))


def logits_of(network: LayerStack, tokens: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """Our logits without padding."""
    return _run(network, tokens)[..., : model.vocab_size]


def generated(network: LayerStack, model: ModelConfig, tokens: torch.Tensor) -> list[list[int]]:
    """Greedy continuations of the first tokens, with our cache; beyond the model's context, as `transformers` does."""
    length = max(model.max_position_embeddings, PROMPT + NEW_TOKENS)
    original = model.original_context if model.uses_rope else None
    longer = dataclasses.replace(model, max_position_embeddings=length, rope_original_max_positions=original)
    config: Any = SimpleNamespace(model=longer, loss=LossConfig())
    tokenizer: Any = SimpleNamespace(vocab_size=model.vocab_size)
    loaded = LoadedModel(config, MESH, tokenizer, network, Path("nowhere"), 0)
    requests = [
        Request(str(row), tuple(prompt), NEW_TOKENS, Sampling(greedy=True))
        for row, prompt in enumerate(tokens[:, :PROMPT].tolist())
    ]
    return [list(completion.tokens) for completion in generate_all(loaded, requests)]


def generated_by_transformers(model: PreTrainedModel, tokens: torch.Tensor) -> list[list[int]]:
    """Greedy continuations of the first tokens, with the cache of `transformers`."""
    prompt = tokens[:, :PROMPT]
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": END}
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, **settings)
    return found[:, PROMPT:].tolist()  # type: ignore[no-any-return]


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference as a share of the largest logit."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def equal_weights(one: LayerStack, other: LayerStack) -> bool:
    """Whether two networks have the same parameters, to the last bit."""
    pairs = zip(_named(one), _named(other), strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


def _named(network: LayerStack) -> Iterator[tuple[str, torch.Tensor]]:
    yield from network.named_parameters()
    yield from needed_states(network)


def _run(network: LayerStack, tokens: torch.Tensor) -> torch.Tensor:
    return network(tokens, StepSettings().context(torch.arange(len(tokens))))  # type: ignore[no-any-return]


def _record(checkpoints: Path) -> tuple[Path, Record]:
    found = newest_record(checkpoints, MESH)
    if found is None:
        raise FileNotFoundError(checkpoints)
    return found.path, Record.from_json(found.record, found.path)
