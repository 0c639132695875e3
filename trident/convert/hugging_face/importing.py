"""Imports a Hugging Face directory as a checkpoint that any layout can load."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron import log
from megatron.checkpoint import write_snapshot
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.storage import DISK, write_text
from megatron.config import ModelConfig
from megatron.errors import ConversionError, StorageError
from megatron.files.replacing import remove_leftovers, temporary_name
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.library import Tokenizer
from megatron.tokenizers.tokenizer import TOKENIZER_FOLDER, TokenizerChoice, build_tokenizer
from trident.convert.hugging_face.model_file import MODEL_FILE, imported_record, model_file_text
from trident.convert.hugging_face.model_tokenizer import (
    added_tokens,
    check_padding,
    check_same_ids,
    copy_tokenizer,
    keep_special_ids,
    name_special_tokens,
    special_ids,
)
from trident.convert.hugging_face.mxfp4 import with_decoded_blocks
from trident.convert.hugging_face.proof import PROOF_NAME, ProofSide, check_digests, expected_logits, proof_text, prove
from trident.convert.hugging_face.reference import check_installed
from trident.convert.hugging_face.registry import family_of
from trident.convert.hugging_face.streaming import (
    ImportedPieces,
    check_weights,
    network_shapes,
    with_table_names,
    without_copies,
    without_later_layers,
)
from trident.convert.hugging_face.table.family import Family
from trident.convert.hugging_face.table.tensors import bind
from trident.convert.hugging_face.weight_files import read_json_file, read_weight_files


@dataclass(frozen=True)
class ModelImportRequest:
    """Options of an import.

    Args:
        source: the model directory.
        target: the checkpoint folder to create.
        tokenizer: a folder with another tokenizer than the directory's.
        has_tokenizer: import a tokenizer, not only the weights.
        proof_layers: number of layers that the proof compares; None for all.
    """

    source: Path
    target: Path
    tokenizer: Path | None = None
    proof_layers: int | None = None
    has_tokenizer: bool = True


def import_model(request: ModelImportRequest) -> Path:
    """Creates a folder with a checkpoint of step 0, `model.yaml`, the tokenizer and `proof.json`; returns it.

    The folder appears only if the logits agree.

    Raises:
        ConversionError: the model is not supported, its files are damaged, or its logits differ.
        StorageError: a file cannot be written.
    """
    check_installed()
    source = request.source
    check_digests(source)
    config = read_json_file(source / "config.json", "the configuration of the model")
    family = family_of(config)
    model = family.read_config(config)
    is_tied = not model.untie_embeddings_and_output_weights
    files = read_weight_files(source, family.head if is_tied else "")
    stored = with_decoded_blocks(with_table_names(family, files))
    stored = without_copies(family, stored, is_tied=is_tied)
    model = family.with_heads(model, stored)
    stored = without_later_layers(family, stored, model.num_layers)
    tensors = bind(family.tensors, network_shapes(model))
    check_weights(family, tensors, stored)
    with unfinished_folder(request.target) as temporary:
        tokenizer = _copied_tokenizer(request, family, model, temporary) if request.has_tokenizer else None
        if tokenizer is not None and not model.bidirectional:
            keep_special_ids(temporary / TOKENIZER_FOLDER, config, tokenizer)
        final = TokenizerChoice(
            "PretrainedFromHF", tokenizer_name_or_path=str(request.target.resolve() / TOKENIZER_FOLDER)
        )
        text = model_file_text(model, final, tokenizer, f"Imported from {source.resolve()}, a {family.model_type}.")
        write_text(temporary / MODEL_FILE, text)
        [(dtype, _)] = Counter(tensor.dtype for tensor in stored.values()).most_common(1)
        record = imported_record(temporary / MODEL_FILE, request.target, model, tokenizer, dtype, family.model_type)
        paddings = range(model.vocab_size)  # any padding token of the model
        expected = expected_logits(ProofSide(family, source, model, tokenizer, paddings, request.proof_layers))
        snapshot = ImportedPieces(tensors, stored).snapshot()
        log.info(f"importing {len(tensors)} tensors of {source}, a {family.model_type}")
        saved = write_snapshot(temporary, 0, snapshot, record.to_json(), ParallelMesh.single())
        proof = prove(expected, saved, read_manifest(saved))
        write_text(temporary / PROOF_NAME, proof_text(proof))
    return request.target


def _copied_tokenizer(request: ModelImportRequest, family: Family, model: ModelConfig, target: Path) -> Tokenizer:
    source, folder = request.tokenizer or request.source, target / TOKENIZER_FOLDER
    folder.mkdir()
    copied = copy_tokenizer(source, folder)
    if model.bidirectional:
        name_special_tokens(source, folder)
    tokenizer = build_tokenizer(copied)
    # Only added tokens may exceed the model's rows (Gemma 3's image token).
    rows = model.vocab_size
    if not set(range(rows, tokenizer.vocab_size)) <= set(added_tokens(tokenizer).values()):
        raise ConversionError(
            f"the tokenizer in {source} has {tokenizer.vocab_size} tokens, and the model has rows for {rows} "
            "(vocab_size). Give the tokenizer that it was trained with (--tokenizer-name-or-path)."
        )
    check_same_ids(folder, tokenizer)
    check_padding(family, special_ids(folder, tokenizer))
    return tokenizer


@contextlib.contextmanager
def unfinished_folder(target: Path) -> Iterator[Path]:
    """Context manager for a temporary folder next to the target: renamed to it on success, removed on failure.

    Removes leftovers of killed runs first.

    Raises:
        ConversionError: the target exists.
        StorageError: the file system refused.
    """
    if DISK.exists(target):
        raise ConversionError(f"{target} already exists, and nothing is overwritten. Remove it or name another folder.")
    target = target.absolute()
    for leftover in remove_leftovers(target):
        log.info(f"removed {leftover}, which a killed run left unfinished")
    temporary = temporary_name(target)
    try:
        DISK.make_directories(target.parent)
        DISK.make_directory(temporary)
    except OSError as failure:
        raise StorageError(f"cannot create the folder {temporary}: {failure.strerror or failure}.") from failure
    try:
        yield temporary
        DISK.sync_directory(temporary)
        DISK.rename(temporary, target)
        DISK.sync_directory(target.parent)
    except OSError as failure:
        raise StorageError(f"cannot finish {target}: {failure.strerror or failure}. Nothing was written.") from failure
    finally:
        DISK.remove_tree(temporary)
