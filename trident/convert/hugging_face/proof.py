"""Proves a conversion: the network and `transformers` compute the same logits and gradients in float32.

`proof_batches.py` has the inputs. A large model is proved by its first layers.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron import __version__, log
from megatron.checkpoint.manifests.contents import Manifest
from megatron.checkpoint.reader import CheckpointReader
from megatron.config import ModelConfig
from megatron.errors import ConversionError
from megatron.files.plain import open_plain, sha256_of
from megatron.model.interface.network import LayerKind, LayerStack
from megatron.model.interface.step_context import MaskKind, StepSettings
from megatron.model.networks import network_layers
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import Kind, PieceKey, filling
from megatron.parallel.shard_spec import shard_spec_of
from megatron.tokenizers.tokenizer import Tokenizer
from trident.convert.hugging_face.proof_batches import ProofBatch, described, proof_batches, token_gradients
from trident.convert.hugging_face.reference import ReferenceLogits, auto_class, check_installed, reference_logits
from trident.convert.hugging_face.streaming import needed_states
from trident.convert.hugging_face.table.family import Family
from trident.convert.hugging_face.weight_files import read_json_file

TOLERANCE = 1e-5  # of the largest logit
# Of the largest gradient. Rounding errors grow through a deep network; a row that is not trained differs far more.
GRADIENT_TOLERANCE = 1e-3
PROOF_NAME = "proof.json"

_BLOB = re.compile("/blobs/[0-9a-f]{64}$")
_LARGEST_FLOOR = 1e-4  # of the largest logit: limit of the difference between transformers' own implementations


@dataclass(frozen=True)
class ProofSide:
    """A model directory to compare with.

    Args:
        tokenizer: for real texts; without one only random ids are compared.
        paddings: allowed padding tokens, whose embeddings transformers does not train.
        layers: number of first layers to compare; None for all.
    """

    family: Family
    folder: Path
    model: ModelConfig
    tokenizer: Tokenizer | None
    paddings: Container[int]
    layers: int | None = None

    @property
    def shortened(self) -> ModelConfig:
        """The architecture with the compared layers and without padding."""
        layers = min(self.layers or self.model.num_layers, self.model.num_layers)
        return dataclasses.replace(self.model, num_layers=layers, padded_vocab_size=self.model.vocab_size)


@dataclass(frozen=True)
class Expected:
    """The outputs of `transformers` for a model directory."""

    side: ProofSide
    batches: tuple[ProofBatch, ...]
    logits: ReferenceLogits

    @property
    def largest(self) -> float:
        return float(torch.stack([values.abs().max() for values in self.logits.values]).max())


def expected_logits(side: ProofSide, attention: str | None = None) -> Expected:
    """Computes the logits of a model directory with `transformers`.

    Args:
        attention: its implementation; default: sdpa, if it supports the configuration.

    Raises:
        ConversionError: it cannot load the directory, or the logits are all 0 or not finite.
    """
    model = side.shortened
    batches = tuple(proof_batches(model, side.tokenizer, side.family.padding_id))
    # transformers' sdpa silently ignores soft caps of scores.
    default = "sdpa" if model.attention_logit_softcap is None else "eager"
    log.info(f"transformers computes logits of {model.num_layers} layers over {batches[-1].tokens.shape[1]} tokens")
    logits = reference_logits(
        side.folder,
        _shortened_config(side),
        batches,
        attention or default,
        auto_class(model),
        paddings=side.paddings,
        is_shortened=model.num_layers < side.model.num_layers,
        is_ignored=lambda name: side.family.is_ignored(name) or side.family.is_later(name, side.model.num_layers),
    )
    expected = Expected(side, batches, logits)
    if not 0 < expected.largest < float("inf"):
        raise ConversionError(
            f"the largest logit of {side.folder} is {expected.largest}, which proves nothing. Convert a model that "
            "computes something."
        )
    return expected


def prove(
    expected: Expected,
    checkpoint: Path,
    manifest: Manifest,
    rounded_to: torch.dtype | None = None,
    kind: Kind = "weight",
) -> dict[str, Any]:
    """Compares logits and gradients of a checkpoint folder and returns the contents of `proof.json`.

    Args:
        rounded_to: element type of the export; the checkpoint's weights are rounded to it first.
        kind: the compared values: the weights or their averages.

    Raises:
        ConversionError: they differ.
    """
    side, model = expected.side, expected.side.shortened
    stack = _our_network(model, checkpoint, manifest, rounded_to, kind)
    with torch.no_grad():
        ours = [values for batch in expected.batches for values in _outputs(stack, batch, model)]
    difference, largest = _difference(ours, expected.logits.values), expected.largest
    allowed, floor = TOLERANCE * largest, None
    if not difference <= allowed and expected.logits.attention == "sdpa":
        floor = _difference(expected_logits(side, "eager").logits.values, expected.logits.values)
        allowed = max(allowed, min(floor, _LARGEST_FLOOR * largest))
    if not difference <= allowed:
        raise ConversionError(
            f"the logits differ from transformers' by {difference:.3g}, and {allowed:.3g} is allowed "
            f"({TOLERANCE:g} x the largest logit {largest:.3g}, or transformers' own difference between its attention "
            "implementations). The conversion is wrong, so nothing was written; please report the config.json."
        )
    log.info(f"logits are equal: the largest difference is {difference:.3g} at logits up to {largest:.3g}")
    return {
        "is_equal": True,
        "largest_difference": difference,
        "largest_logit": largest,
        "allowed_difference": allowed,
        "tolerance": TOLERANCE,
        "eager_to_sdpa_difference": floor,
        "gradient": _compared_gradients(expected.logits, stack, model),
        "attention": expected.logits.attention,
        "dtype": "float32",
        "weights_rounded_to": None if rounded_to is None else str(rounded_to).removeprefix("torch."),
        "model_type": side.family.model_type,
        "layers": model.num_layers,
        "layers_of_model": side.model.num_layers,
        "versions": {
            "trident-megatron": __version__,
            "transformers": check_installed(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "sequences": [sequence for batch in expected.batches for sequence in described(batch)],
    }


def proof_text(report: dict[str, Any]) -> str:
    """Formats the result of `prove` as JSON, with one entry per line."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in report.items()) + "\n}\n"


def file_digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file in a folder, by name."""
    return {path.name: _digest(path) for path in sorted(folder.iterdir())}


def check_digests(folder: Path) -> None:
    """Compares the files of a model directory with their recorded checksums, if any.

    In the hub's cache a snapshot links to weights as `blobs/<SHA-256>`.

    Raises:
        ConversionError: a file has changed, is missing or cannot be read.
    """
    recorded = read_json_file(folder / PROOF_NAME, "the proof").get("files") if (folder / PROOF_NAME).exists() else None
    files = {path.name: path.resolve() for path in folder.glob("*.safetensors")}
    blobs = {name: file.name for name, file in files.items() if _BLOB.search(file.as_posix())}
    for name, digest in {**blobs, **(recorded if isinstance(recorded, dict) else {})}.items():
        path = folder / Path(name).name
        try:
            actual = _digest(path)
        except OSError as failure:
            actual = failure.strerror or str(failure)
        if actual != digest:
            raise ConversionError(
                f"{path} has changed since it was written or downloaded: expected SHA-256 {digest}, got {actual}. Copy "
                f"or download it again; if you changed it on purpose, remove the {PROOF_NAME} next to it."
            )


def _digest(path: Path) -> str:
    with open_plain(path) as stream:
        return sha256_of(stream)


def _shortened_config(side: ProofSide) -> dict[str, Any]:
    """The `config.json` with the compared layers; lists with an entry per layer are truncated."""
    config = read_json_file(side.folder / "config.json", "the configuration of the model")
    layers, kept = side.model.num_layers, side.shortened.num_layers
    if kept == layers:
        return config
    name = dict(rule.names for rule in side.family.fields)["num_layers"]
    described = config[side.family.text_field] if side.family.text_field else config
    cut = {
        key: value[:kept] if isinstance(value, list) and len(value) == layers else value
        for key, value in described.items()
    }
    shortened = {**cut, name: kept}
    return {**config, side.family.text_field: shortened} if side.family.text_field else shortened


def _compared_gradients(theirs: ReferenceLogits, stack: LayerStack, model: ModelConfig) -> dict[str, Any] | str:
    """Compares the gradients of the input embedding; returns the entry of `proof.json`."""
    if theirs.gradient is None:
        return "not compared: the gradient of the embedding does not fit into memory"
    weight = stack.requires_grad_(False).get_parameter("embedding.word_embeddings.weight").requires_grad_(True)
    ours = token_gradients(next(_outputs(stack, theirs.learned, model)), theirs.learned, weight)
    difference, largest = _difference([ours], [theirs.gradient]), float(theirs.gradient.abs().max())
    if not difference <= GRADIENT_TOLERANCE * largest:
        token = int(theirs.learned.tokens.unique()[(ours - theirs.gradient).abs().amax(1).argmax()])
        raise ConversionError(
            f"the gradient of the embedding of token {token} differs from transformers' by {difference:.3g}, and "
            f"{GRADIENT_TOLERANCE * largest:.3g} is allowed ({GRADIENT_TOLERANCE:g} x the largest), so it would be "
            "trained differently. Nothing was written; please report the config.json."
        )
    if theirs.padding is not None:
        log.info(f"the padding token {theirs.padding} is skipped: transformers does not train its embedding")
    return {"largest_difference": difference, "largest": largest, "left_out": theirs.padding}


def _our_network(
    model: ModelConfig, checkpoint: Path, manifest: Manifest, rounded_to: torch.dtype | None, kind: Kind
) -> LayerStack:
    stack = LayerStack(network_layers(model, ParallelMesh.single())).eval()
    targets = (
        (PieceKey.of(shard_spec_of(parameter), name, kind), parameter.detach().view(-1))
        for name, parameter in (*stack.named_parameters(), *needed_states(stack))
    )
    reader = CheckpointReader(checkpoint, manifest, filling(targets))
    reader.verify()
    reader.deliver()
    if rounded_to is not None:
        for parameter in stack.parameters():
            parameter.data = parameter.data.to(rounded_to).float()
    return stack


def _outputs(stack: LayerStack, batch: ProofBatch, model: ModelConfig) -> Iterator[torch.Tensor]:
    """Logits of a batch at its positions, and sentence order logits if the network has that head."""
    ids = batch.tokens
    is_padded = batch.is_text is not None
    mask = MaskKind.DOCUMENTS if is_padded else MaskKind.CAUSAL
    settings = StepSettings(mask=mask, drops_tokens=False)  # transformers drops none
    context = settings.context(
        torch.arange(ids.shape[0]),
        (~batch.is_text).long() if batch.is_text is not None else None,
        token_types=batch.token_types,
        predicted=batch.positions.expand(ids.shape[0], -1) if model.bidirectional else None,
    )
    hidden: Any = ids
    for spec, layer in stack.named_layers():
        if spec.kind is LayerKind.HEAD and not model.bidirectional:
            hidden = hidden[:, batch.positions]
        hidden = layer(hidden, context)
    logits, *others = hidden if isinstance(hidden, tuple) else (hidden,)
    yield logits[..., : model.vocab_size].float()
    for values in others:
        yield values.float()


def _difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """The largest difference; infinite if a value is NaN."""
    differences = [float((a - b[..., : a.shape[-1]]).abs().max()) for a, b in zip(ours, theirs, strict=True)]
    return float("inf") if any(value != value for value in differences) else max(differences)
