"""From a checkpoint of Megatron-LM, its forks or DeepSpeed to one of ours, which any layout loads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron import __version__, log
from megatron.checkpoint import write_snapshot
from megatron.checkpoint.record import Record
from megatron.checkpoint.storage import Storage, cannot_write, write_file
from megatron.config import Machine, TokenizerFacts, parse, resolve
from megatron.convert.hugging_face.importing import unfinished_folder
from megatron.convert.hugging_face.model_file import MODEL_FILE, model_file_text
from megatron.convert.megatron_format.model import ForeignModel, ForeignPieces
from megatron.data.order.plan import DataPlan
from megatron.errors import ConfigError, ConversionError
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice

# What a run needs and a stored run may not say; a run that continues the checkpoint gives its own.
_REQUIRED: Mapping[str, Any] = {
    "seq_length": None,
    "micro_batch_size": 1,
    "global_batch_size": None,
    "train_iters": 1,
    "lr": 1e-5,
}


@dataclass(frozen=True)
class ImportRequest:
    """What to make.

    Args:
        target: the folder of checkpoints to make.
        choice: the tokenizer of the run.
        average: take the mean of tensors that tensor-parallel ranks should hold alike and do not.
    """

    target: Path
    choice: TokenizerChoice
    average: bool = False


def import_checkpoint(source: ForeignModel, request: ImportRequest, tokenizer: Tokenizer) -> Path:
    """Makes a folder with a checkpoint and `model.yaml`; returns it. Either all of it appears, or nothing.

    With moments the checkpoint is at the step of its run, and training resumes from it with `--load`; with weights only
    it is at step 0, for `--finetune`.

    Raises:
        ConversionError: tensors are missing, differ between ranks, or do not fit the tokenizer.
        StorageError: the file system refused.
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
        text += "".join(f"{name.replace('_', '-')}: {value}\n" for name, value in _run_flags(source))
        _write(folder / MODEL_FILE, text)
        record = _record(source, folder / MODEL_FILE, tokenizer)
        taken = ForeignPieces(source, request.average).snapshot()
        step = source.state.progress.step
        write_snapshot(folder, step, taken, record.to_json(), ParallelMesh.single())
    return request.target


def _run_flags(source: ForeignModel) -> Iterator[tuple[str, str]]:
    """The flags of the run that a resume needs, as YAML; none for weights alone."""
    for name, value in source.state.flags.items() if source.has_moments else ():
        text = json.dumps(value)
        is_exponent_only = isinstance(value, float) and "e" in text and "." not in text  # text to YAML
        yield name, text.replace("e", ".0e") if is_exponent_only else text


def _record(source: ForeignModel, model_file: Path, tokenizer: Tokenizer) -> Record:
    """The record of the checkpoint.

    Raises:
        ConversionError: the stored flags do not make up a run, or the vocabulary is another one.
    """
    try:
        request = parse(_words(source, model_file))
    except ConfigError as failure:
        raise ConversionError(
            f"the arguments stored in {source.path} do not make up a run: {failure} Import the weights alone with "
            "--weights-only."
        ) from failure
    machine = Machine("cpu", 1, supports_fp16=True, supports_bf16=True)
    made_with = TokenizerRecord.of(tokenizer)
    config = resolve(
        request, machine, TokenizerFacts(tokenizer.vocab_size, made_with.eod_id or 0, made_with.fingerprint or "")
    )
    if config.model.vocab_size != source.model.vocab_size:
        raise ConversionError(
            f"{source.path} has {source.model.vocab_size} rows for tokens, and a run with this tokenizer would have "
            f"{config.model.vocab_size}. Give the tokenizer of that run."
        )
    order = config.data.index_epoch_rule
    return Record(
        progress=source.state.progress,
        optimizer_updates=source.state.updates,
        loss_scale=dict(source.state.loss_scale),
        config=config.to_json(),
        data_plan=DataPlan(config.data.seq_length, config.random.seed, order, train=None, valid=(), test=()),
        data={},
        tokenizer=made_with,
        program_version=__version__,
    )


def _words(source: ForeignModel, model_file: Path) -> list[str]:
    """The command line of the run that the checkpoint stands for, completed where nothing is stored."""
    flags = source.state.flags if source.has_moments else {}
    words = ["--config", str(model_file), "--data-path", "none", *([] if source.has_moments else ["--no-save-optim"])]
    for name, value in _REQUIRED.items():
        is_given = name in flags or (name == "train_iters" and "train_samples" in flags)
        if name == "seq_length":
            value = source.state.flags.get(name, source.model.max_position_embeddings)
        elif name == "global_batch_size":
            value = flags.get("micro_batch_size", 1)
        if not is_given:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def _absolute(choice: TokenizerChoice) -> TokenizerChoice:
    """The same files, whatever the current folder is."""
    names = ("vocab_file", "merge_file", "tokenizer_name_or_path")
    paths = {
        name: str(Path(value).resolve())
        for name in names
        if (value := getattr(choice, name)) is not None and Path(value).exists()
    }
    return dataclasses.replace(choice, **paths)


def _write(path: Path, text: str) -> None:
    storage = Storage()
    try:
        write_file(storage, path, text.encode())
    except OSError as failure:
        raise cannot_write(storage, path, len(text), failure) from failure
