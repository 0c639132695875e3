"""Exports a checkpoint of any layout as a directory that Hugging Face's libraries load offline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron import log
from megatron.checkpoint.catalogue import ITEM_BYTES, Catalogue
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.snapshot import TORCH_TYPES
from megatron.checkpoint.storage import write_text
from megatron.config import ModelConfig
from megatron.config.sections.data import DataConfig
from megatron.data.build import data_prefixes
from megatron.data.datasets.examples.example_files import names_example_files
from megatron.errors import CheckpointError, ConversionError
from megatron.parallel.pieces import Kind
from megatron.tokenizers.chat import ChatTemplate, load_chat_template, tokenizer_folder
from megatron.tokenizers.record import NO_TOKENIZER, TokenizerRecord
from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice, build_tokenizer
from trident.convert.hugging_face.importing import unfinished_folder
from trident.convert.hugging_face.model_tokenizer import (
    adds_special_tokens,
    check_padding,
    check_same_ids,
    keep_special_ids,
    special_ids,
    write_chat_template,
    write_tokenizer,
)
from trident.convert.hugging_face.proof import PROOF_NAME, ProofSide, expected_logits, file_digests, proof_text, prove
from trident.convert.hugging_face.reference import check_installed
from trident.convert.hugging_face.registry import family_for
from trident.convert.hugging_face.streaming import CheckpointSource, exported_values, network_shapes, optional_states
from trident.convert.hugging_face.table.tensors import bind, parts_by_tensor, their_shapes
from trident.convert.hugging_face.weight_files import PlannedTensor, plan_files, write_files, write_json

LARGEST_FILE_BYTES = 5 * 10**9
# Values of --dtype -> element types of safetensors.
DTYPES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class ExportRequest:
    """Options of an export.

    Args:
        checkpoint: one checkpoint folder.
        target: the model directory to create.
        model: the architecture of the checkpoint.
        tokenizer: the flags that select its tokenizer.
        recorded: the tokenizer that the checkpoint was trained with.
        dtype: float32, bfloat16 or float16; None for the stored types.
        largest_file_bytes: maximum size of a weight file.
        model_type: the family to export as; None for `origin`, or the first that can express the network.
        origin: the family that the weights were imported from, or empty.
        chat_template: the chat template that the model was tuned with, if any.
        proof_layers: number of layers that the proof compares; None for all.
        kind: the weights, or their averages of --ema-decay.
    """

    checkpoint: Path
    target: Path
    model: ModelConfig
    tokenizer: TokenizerChoice
    recorded: TokenizerRecord
    dtype: str | None = None
    largest_file_bytes: int = LARGEST_FILE_BYTES
    model_type: str | None = None
    proof_layers: int | None = None
    origin: str = ""
    chat_template: ChatTemplate | None = None
    kind: Kind = "weight"


def export_model(request: ExportRequest) -> Path:
    """Creates a directory with weights, configurations, tokenizer and `proof.json`; returns it.

    The directory appears only if the logits agree.

    Raises:
        ConversionError: no family can express the network, or its logits differ.
        CheckpointError: the checkpoint is damaged or does not match its configuration.
        StorageError: a file cannot be written.
    """
    check_installed()
    model, stored_model = dataclasses.replace(request.model, mtp_num_layers=0), request.model
    family = family_for(model, request.model_type, request.origin)
    config = family.write_config(model)
    manifest = read_manifest(request.checkpoint)
    source = CheckpointSource(request.checkpoint, manifest, request.kind)
    shapes = network_shapes(model)
    known = {*network_shapes(stored_model), *optional_states(stored_model)}
    _check_contents(request, manifest.catalogue, known)
    if stored_model.mtp_num_layers:
        log.info(
            f"the weights of --mtp-num-layers {stored_model.mtp_num_layers} are skipped: transformers does not "
            "compute multi-token prediction"
        )
    tensors = bind(family.tensors, shapes)
    parts = parts_by_tensor(tensors)
    dtypes, requested = {}, None if request.dtype is None else DTYPES[request.dtype]
    for name, [(tensor, _), *_] in parts.items():
        dtypes[name] = source.dtype_of(tensor.ours) if requested is None or tensor.is_state else requested
    planned = [PlannedTensor(name, dtypes[name], shape) for name, shape in their_shapes(tensors).items()]
    weights = [dtypes[name] for name, held in parts.items() if not held[0][0].is_state]
    widest = max(weights, key=lambda dtype: (ITEM_BYTES[dtype], dtype))
    with unfinished_folder(request.target) as temporary:
        tokenizer = build_tokenizer(request.tokenizer)
        _check_tokenizer(request, tokenizer)
        write_tokenizer(request.tokenizer, tokenizer, temporary, model.max_position_embeddings)
        if request.chat_template is not None:
            write_chat_template(temporary, request.chat_template, tokenizer)
        check_same_ids(temporary, tokenizer, is_bare=adds_special_tokens(request.tokenizer))
        ids = special_ids(temporary, tokenizer)
        check_padding(family, ids)
        write_json(temporary / "config.json", {**config, **_generation_fields(ids, TORCH_TYPES[widest])})
        if not model.bidirectional:
            keep_special_ids(temporary, ids, tokenizer)
        log.info(f"exporting {request.checkpoint} as {family.model_type}: {len(planned)} tensors")

        def values(tensor: PlannedTensor) -> Any:
            return exported_values(source, parts[tensor.name], TORCH_TYPES[tensor.dtype])

        write_files(temporary, plan_files(planned, request.largest_file_bytes), values)
        rounded_to = None if requested is None else TORCH_TYPES[requested]
        paddings = [ids["pad_token_id"]] if "pad_token_id" in ids else []
        expected = expected_logits(ProofSide(family, temporary, model, tokenizer, paddings, request.proof_layers))
        proof = prove(expected, request.checkpoint, manifest, rounded_to, request.kind)
        write_text(temporary / PROOF_NAME, proof_text({**proof, "files": file_digests(temporary)}))
    return request.target


def tuned_template(name: str | None, data: DataConfig, tokenizer: TokenizerChoice) -> ChatTemplate | None:
    """The chat template that a model was tuned with; None if its run had no examples and no template.

    Args:
        name: its name or file, if set.
        data: the training data.

    Raises:
        ConfigError: it is invalid, or its file is missing.
    """
    if name is None and not any(map(names_example_files, data_prefixes(data))):
        return None
    return load_chat_template(name, tokenizer_folder(tokenizer))


def _check_contents(request: ExportRequest, catalogue: Catalogue, known: Set[str]) -> None:
    """Checks that the checkpoint has the requested averages, and only tensors of the network."""
    names = catalogue.names()
    if request.kind == "average" and not any("average" in catalogue.kinds(name) for name in names):
        raise CheckpointError(
            f"{request.checkpoint} holds no averaged weights (--averaged-weights): its run was trained without "
            "--ema-decay or --optimizer schedule-free. Drop --averaged-weights."
        )
    unknown = sorted(set(names) - known)
    if unknown:
        raise ConversionError(
            f"{request.checkpoint} holds {', '.join(unknown[:5])}{', ...' if len(unknown) > 5 else ''}, which the "
            "network of its configuration does not have; they would be lost. Export with the program version that "
            "wrote it."
        )


def _check_tokenizer(request: ExportRequest, tokenizer: Tokenizer) -> None:
    """Checks that the tokenizer may be the recorded one; accepts other forms of it, such as a tokenizer.json."""
    recorded = request.recorded
    if recorded.name != NO_TOKENIZER and tokenizer.vocab_size != recorded.vocab_size:
        raise ConversionError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, and the checkpoint was trained with "
            f"{recorded.name}, which has {recorded.vocab_size}. Give the same one (--tokenizer-name-or-path, or "
            "--vocab-file and --merge-file)."
        )
    if not recorded.is_of(tokenizer):
        differing = recorded.differences(tokenizer)
        log.warning(
            f"the tokenizer {tokenizer.name} is not the file that the checkpoint was trained with ({recorded.name})"
            f"{f': {differing}' if differing else ''}. Make sure that it is another form of the same one."
        )


def _generation_fields(ids: Mapping[str, int], dtype: torch.dtype) -> dict[str, Any]:
    """Fields of `config.json` that do not describe the network; both names of the dtype, for older readers."""
    # Missing tokens are null: the defaults of a family may be outside the vocabulary.
    none = {name: None for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    name = str(dtype).removeprefix("torch.")
    return {**none, **ids, "dtype": name, "torch_dtype": name, "use_cache": True}
