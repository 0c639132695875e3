"""Imports checkpoints of Megatron-LM, its forks and DeepSpeed in any of their formats."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from megatron import log
from megatron.checkpoint import write_snapshot
from megatron.checkpoint.record import Record
from megatron.checkpoint.storage import write_text
from megatron.config import parse
from megatron.errors import ConfigError, ConversionError
from megatron.files.plain import read_plain
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice
from trident.convert.deepspeed_format.engine_files import is_engine_folder, open_engine_folder
from trident.convert.deepspeed_format.universal import is_universal, open_universal
from trident.convert.hugging_face.importing import unfinished_folder
from trident.convert.hugging_face.model_file import MODEL_FILE, model_file_text, untrained_record, yaml_value
from trident.convert.megatron_format.distributed_files import is_distributed, open_distributed
from trident.convert.megatron_format.foreign_model import ForeignModel, ForeignPieces
from trident.convert.megatron_format.torch_files import ImportOptions, is_torch_layout, open_torch_layout

# Files that contain the name of the newest checkpoint of a directory.
_POINTERS = ("latest_universal", "latest", "latest_checkpointed_iteration.txt")
_LONGEST_NAME = 200
_LONGEST_POINTER_BYTES = 4096


def open_foreign(path: Path, choices: ImportOptions) -> ForeignModel:
    """Opens a checkpoint folder, or the newest one of a directory.

    Raises:
        ConversionError: its format is unknown, it is incomplete, or its network is not supported.
        CheckpointError: a file is damaged or contains something that is not allowed.
    """
    folder = newest_folder(path)
    if is_universal(folder):
        return open_universal(folder, choices)
    if is_distributed(folder):
        return open_distributed(folder, choices)
    if is_torch_layout(folder):
        return open_torch_layout(folder, choices)
    if is_engine_folder(folder):
        return open_engine_folder(folder, choices)
    names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:6]) or "nothing"
    raise ConversionError(
        f"{folder} has no known checkpoint format; it contains {names}. Known are mp_rank_XX/model_optim_rng.pt and "
        "torch_dist (Megatron-LM), layer_XX-model_YY-model_states.pt and mp_rank_XX_model_states.pt (DeepSpeed), "
        "and zero/ (DeepSpeed universal). Hugging Face directories are imported by tools/convert/import_hf.py."
    )


def newest_folder(path: Path) -> Path:
    """The folder that `latest`, `latest_universal` or `latest_checkpointed_iteration.txt` points to.

    Raises:
        ConversionError: the directory does not exist, or the file points to no folder.
    """
    if not path.is_dir():
        raise ConversionError(f"{path} is not a directory. Give the folder of a checkpoint.")
    for name in _POINTERS:
        pointer = path / name
        if not pointer.exists():
            continue
        try:
            text = read_plain(pointer, _LONGEST_POINTER_BYTES).decode(errors="replace")[:_LONGEST_NAME].strip()
        except OSError as failure:
            raise ConversionError(
                f"{pointer} cannot be read: {failure.strerror}. Give the checkpoint's own folder."
            ) from failure
        folder = f"iter_{int(text):07d}" if text.isascii() and text.isdecimal() and name == _POINTERS[-1] else text
        if not folder or folder in (".", "..") or "/" in folder or "\\" in folder or not (path / folder).is_dir():
            raise ConversionError(
                f"{pointer} names {text!r}, which does not exist in {path}. Give the checkpoint's own folder."
            )
        return path / folder
    return path


@dataclass(frozen=True)
class MegatronImportRequest:
    """Options of an import.

    Args:
        target: the checkpoint folder to create.
        choice: the tokenizer of the run.
        average: average replicated tensors that differ between tensor-parallel ranks.
    """

    target: Path
    choice: TokenizerChoice
    average: bool = False


def import_checkpoint(source: ForeignModel, request: MegatronImportRequest, tokenizer: Tokenizer) -> Path:
    """Creates a folder with a checkpoint and `model.yaml` atomically; returns it.

    With optimizer moments the checkpoint has the step of its run, and training resumes from it with `--load`; with
    weights only it is at step 0, for `--finetune`.

    Raises:
        ConversionError: tensors are missing, differ between ranks, or do not match the tokenizer.
        StorageError: a file cannot be written.
    """
    source.check()
    if tokenizer.vocab_size > source.model.vocab_size:
        raise ConversionError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, and {source.path} was trained with "
            f"{source.model.vocab_size}. Give the tokenizer of that run (--tokenizer-type, --vocab-file, --merge-file, "
            "--tokenizer-name-or-path)."
        )
    for note in source.notes:
        log.warning(note)
    with unfinished_folder(request.target) as folder:
        choice = _absolute(request.choice)
        text = model_file_text(source.model, choice, tokenizer, f"Imported from {source.path}: {source.format}.")
        if source.has_moments:  # a resume needs the flags of the run
            flags = source.state.flags.items()
            text += "".join(f"{name.replace('_', '-')}: {yaml_value(value)}\n" for name, value in flags)
        write_text(folder / MODEL_FILE, text)
        record = _record(source, folder / MODEL_FILE, request.target, tokenizer)
        snapshot = ForeignPieces(source, request.average).snapshot()
        step = source.state.progress.step
        write_snapshot(folder, step, snapshot, record.to_json(), ParallelMesh.single())
    return request.target


def _record(source: ForeignModel, model_file: Path, target: Path, tokenizer: Tokenizer) -> Record:
    """The record of the checkpoint.

    Args:
        model_file: path of `model.yaml` during the import.
        target: its final folder.
    """
    arguments = _run_arguments(source, model_file)
    try:
        parse(arguments)
    except ConfigError as failure:
        raise ConversionError(
            f"the arguments stored in {source.path} are not valid for a run: {failure} Import only the weights with "
            "--weights-only."
        ) from failure
    record = untrained_record(arguments, TokenizerRecord.of(tokenizer), target)
    vocabulary = record.config["model"]["vocab_size"]
    if vocabulary != source.model.vocab_size:
        raise ConversionError(
            f"{source.path} has {source.model.vocab_size} rows for tokens, and a run with this tokenizer would have "
            f"{vocabulary}. Give the tokenizer of that run."
        )
    return dataclasses.replace(
        record,
        progress=source.state.progress,
        optimizer_updates=source.state.updates,
        loss_scale=dict(source.state.loss_scale),
    )


def _run_arguments(source: ForeignModel, model_file: Path) -> list[str]:
    """The command line of the checkpoint's run, with placeholders for missing values."""
    flags = source.state.flags if source.has_moments else {}
    arguments = ["--config", str(model_file), "--data-path", "none"]
    arguments += [] if source.has_moments else ["--no-save-optim"]
    # Required by a run, but possibly not stored; a run that loads the checkpoint sets its own.
    required = {
        "seq_length": source.state.flags.get("seq_length", source.model.max_position_embeddings),
        "micro_batch_size": 1,
        "global_batch_size": flags.get("micro_batch_size", 1),
        "train_iters": 1,
        "lr": 1e-5,
    }
    for name, value in required.items():
        if name not in flags and not (name == "train_iters" and "train_samples" in flags):
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments


def _absolute(choice: TokenizerChoice) -> TokenizerChoice:
    """The tokenizer choice with absolute paths."""
    names = ("vocab_file", "merge_file", "tokenizer_name_or_path")
    paths = {
        name: str(Path(value).resolve())
        for name in names
        if (value := getattr(choice, name)) is not None and Path(value).exists()
    }
    return dataclasses.replace(choice, **paths)
