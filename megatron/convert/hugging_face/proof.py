"""The proof of a conversion: our network and `transformers` give the same logits in float32.

Tokens are random ones, and real ones of the model's tokenizer; sequences are longer than the window and than the
original context, because shorter ones cannot show a mistake there. A large model is proved by its first layers.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron import __version__, log
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.reader import CheckpointReader
from megatron.config import ModelConfig
from megatron.convert.hugging_face.reference import ReferenceLogits, check_installed, reference_logits
from megatron.convert.hugging_face.table.family import Family
from megatron.convert.hugging_face.table.fields import Same
from megatron.convert.hugging_face.weight_files import read_json_file
from megatron.errors import ConversionError
from megatron.model.gpt import gpt_layers
from megatron.model.interface.network import LayerKind, LayerStack
from megatron.model.interface.step_context import StepSettings
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import PieceKey, filling
from megatron.parallel.shard_spec import shard_spec_of
from megatron.tokenizers.tokenizer import Tokenizer

TOLERANCE = 1e-5  # of the largest logit
PROOF_NAME = "proof.json"
REAL_TEXTS = (
    'The treaty was signed in 1648, and both sides kept it. "Why?" she asked; nobody knew.\n\n',
    "def area(radius: float) -> float:\n    return 3.14159 * radius**2  # square metres\n",
    "Straße, naïve, 東京都, Привет мир, ½ — 12,345.67 €\t",
)

_SHORT_TOKENS = 64
_BEYOND_TOKENS = 16
_MOST_POSITIONS = 64
_SEED = 20260101
# Frequencies that change with the length or were stretched from an original context.
_CONTEXT_SCALINGS = ("dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class ProofRequest:
    """What a proof compares.

    Args:
        folder: the model directory.
        checkpoint: a checkpoint folder of ours.
        layers: how many layers are compared, the first ones; None for all.
        rounded_to: the element type that our weights are rounded to first; None where both hold the same values.
    """

    family: Family
    folder: Path
    model: ModelConfig
    checkpoint: Path
    manifest: Manifest
    tokenizer: Tokenizer
    layers: int | None = None
    rounded_to: torch.dtype | None = None


def prove(request: ProofRequest) -> dict[str, Any]:
    """Compares logits and returns what `proof.json` says.

    Raises:
        ConversionError: the logits differ, or transformers cannot load the model directory.
    """
    model = _shortened_model(request)
    config = _shortened_config(request)
    tokens = proof_tokens(model, request.tokenizer)
    positions = [_positions(ids.shape[1]) for ids in tokens]
    shortened = model.num_layers < request.model.num_layers
    # transformers has no sdpa that caps scores, and computes without the cap where it is asked for.
    first = "sdpa" if model.attention_logit_softcap is None else "eager"

    def reference(attention: str) -> ReferenceLogits:
        return reference_logits(request.folder, config, tokens, positions, attention, is_shortened=shortened)

    log.info(f"comparing logits of {model.num_layers} layers over {tokens[-1].shape[1]} tokens with transformers")
    theirs = reference(first)
    ours = _our_logits(request, model, tokens, positions)
    largest = max(float(values.abs().max()) for values in theirs.values)
    difference = _difference(ours, theirs.values)
    allowed, floor = TOLERANCE * largest, None
    if not difference <= allowed and theirs.attention == "sdpa":
        floor = _difference(reference("eager").values, theirs.values)
        allowed = max(allowed, floor)
    report = {
        "is_equal": difference <= allowed,
        "largest_difference": difference,
        "largest_logit": largest,
        "allowed_difference": allowed,
        "tolerance": TOLERANCE,
        "eager_to_sdpa_difference": floor,
        "attention": theirs.attention,
        "dtype": "float32",
        "weights_rounded_to": None if request.rounded_to is None else str(request.rounded_to).removeprefix("torch."),
        "model_type": request.family.model_type,
        "layers": model.num_layers,
        "layers_of_model": request.model.num_layers,
        "sequences": [
            {"kind": kind, "positions": places.tolist(), "tokens": row.tolist()}
            for ids, places in zip(tokens, positions, strict=True)
            for kind, row in zip(("random", "real"), ids, strict=True)
        ],
        "versions": {
            "trident-megatron": __version__,
            "transformers": check_installed(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }
    if not largest > 0:
        raise ConversionError(
            f"the largest logit of {request.folder} is {largest}, which proves nothing. Convert a model with weights."
        )
    if not report["is_equal"]:
        raise ConversionError(
            f"the logits differ from those of transformers by {difference:.3g}, and {allowed:.3g} is allowed "
            f"({TOLERANCE:g} x the largest logit {largest:.3g}, or transformers' own difference between its attention "
            "implementations). The conversion is wrong, so nothing was written; please report the config.json."
        )
    log.info(f"logits are equal: the largest difference is {difference:.3g} at logits up to {largest:.3g}")
    return report


def proof_text(report: dict[str, Any]) -> str:
    """What `prove` returned as JSON, with one entry a line."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in report.items()) + "\n}\n"


def proof_tokens(model: ModelConfig, tokenizer: Tokenizer) -> list[torch.Tensor]:
    """Batches of a random and a real sequence: a short batch and, where the model has a window or another context, one
    that is longer than those.

    Shapes: `[2, s]` int64 each.
    """
    return [
        torch.tensor([_random_row(model.vocab_size, length), _real_row(model.vocab_size, length, tokenizer)])
        for length in proof_lengths(model)
    ]


def proof_lengths(model: ModelConfig) -> list[int]:
    """The lengths that are compared, in tokens."""
    needed = [_SHORT_TOKENS]
    if model.attention_window is not None:
        needed.append(model.attention_window + _BEYOND_TOKENS)
    if model.uses_rope and model.rope_scaling_type in _CONTEXT_SCALINGS:
        needed.append((model.rope_original_max_positions or model.max_position_embeddings) + _BEYOND_TOKENS)
    if model.position_embedding_type == "learned_absolute":
        needed = [min(length, model.max_position_embeddings) for length in needed]
    short, long = min(needed), max(needed)
    return [short] if long == short else [short, long]


def _random_row(vocab_size: int, length: int) -> list[int]:
    drawn = torch.Generator().manual_seed(_SEED)
    return torch.randint(vocab_size, (length,), generator=drawn).tolist()


def _real_row(vocab_size: int, length: int, tokenizer: Tokenizer) -> list[int]:
    ids = [token for text in REAL_TEXTS for token in tokenizer.encode(text) if token < vocab_size]
    return (ids * (length // max(1, len(ids)) + 1))[:length]


def _positions(length: int) -> torch.Tensor:
    """Where logits are compared: everywhere in a short sequence, at evenly spaced places in a long one."""
    if length <= _MOST_POSITIONS:
        return torch.arange(length)
    return torch.linspace(0, length - 1, _MOST_POSITIONS).round().long()


def _shortened_model(request: ProofRequest) -> ModelConfig:
    """Our architecture with the layers that are compared, and without padding."""
    layers = min(request.layers or request.model.num_layers, request.model.num_layers)
    return dataclasses.replace(request.model, num_layers=layers, padded_vocab_size=request.model.vocab_size)


def _shortened_config(request: ProofRequest) -> dict[str, Any]:
    """The `config.json` with the layers that are compared; lists with an entry for each layer are cut."""
    config = read_json_file(request.folder / "config.json", "the configuration of the model")
    layers = request.model.num_layers
    if request.layers is None or request.layers >= layers:
        return config
    name = next(rule.theirs for rule in request.family.fields if isinstance(rule, Same) and rule.ours == "num_layers")
    cut = {
        key: value[: request.layers] if isinstance(value, list) and len(value) == layers else value
        for key, value in config.items()
    }
    return {**cut, name: request.layers}


def _our_logits(
    request: ProofRequest, model: ModelConfig, tokens: Sequence[torch.Tensor], positions: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Logits of the checkpoint in float32.

    Shapes: `[b, positions, v]` each.
    """
    stack = LayerStack(gpt_layers(model, ParallelMesh.single())).eval()
    targets = (
        (PieceKey.of(shard_spec_of(parameter), name, "weight"), parameter.detach().view(-1))
        for name, parameter in stack.named_parameters()
    )
    reader = CheckpointReader(request.checkpoint, request.manifest, filling(targets))
    reader.verify()
    reader.deliver()
    if request.rounded_to is not None:
        for parameter in stack.parameters():
            parameter.data = parameter.data.to(request.rounded_to).float()
    found = []
    with torch.no_grad():
        for ids, places in zip(tokens, positions, strict=True):
            context = StepSettings().context(torch.arange(ids.shape[0]))
            hidden: torch.Tensor = ids
            for spec, layer in stack.named_layers():
                if spec.kind is LayerKind.HEAD:
                    hidden = hidden[:, places]
                hidden = layer(hidden, context)
            found.append(hidden[..., : model.vocab_size].float())
    return found


def _difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """The largest difference; infinite where a value is not a number."""
    differences = [float((a - b[..., : a.shape[-1]]).abs().max()) for a, b in zip(ours, theirs, strict=True)]
    return float("inf") if any(value != value for value in differences) else max(differences)
