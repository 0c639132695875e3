"""Reads Megatron-LM's `torch` layout: `iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt`.

Source: NVIDIA Megatron-LM and bigscience Megatron-DeepSpeed, `megatron/checkpointing.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.convert.megatron_format.architecture import gate_is_last, model_config
from megatron.convert.megatron_format.model import ForeignModel, Part, Parts, TrainingState, collect
from megatron.convert.megatron_format.tensors import RowOrder
from megatron.convert.megatron_format.torch_optimizer import moments_of
from megatron.convert.megatron_format.training import training_flags, training_state
from megatron.convert.pickles.reader import ForeignTensor, read_pickles, tensors_in
from megatron.errors import ConversionError
from megatron.parallel.pieces import Kind

_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")


@dataclass(frozen=True)
class Choices:
    """What a user says about a foreign checkpoint.

    Args:
        vocab_size: tokens of the tokenizer, for files that do not say how many rows are padding.
        rotary_is_sound: see `model_config`.
    """

    vocab_size: int
    rotary_is_sound: bool = False


@dataclass(frozen=True)
class RankFile:
    """The file of one tensor-parallel rank of one pipeline stage."""

    tensor_rank: int
    stage: int
    content: Mapping[str, Any]


def is_torch_layout(folder: Path) -> bool:
    """Whether a folder holds `mp_rank_XX/model_optim_rng.pt`."""
    return any((path / name).is_file() for path in folder.glob("mp_rank_*") for name in _FILES)


def open_torch_layout(folder: Path, choices: Choices) -> ForeignModel:
    """Opens a checkpoint in the `torch` layout.

    Raises:
        ConversionError: files are missing, or the network is not one of ours.
        CheckpointError: a file is damaged or holds what is not admitted.
    """
    files = list(_rank_files(folder))
    ranks, stages = 1 + max(file.tensor_rank for file in files), 1 + max(file.stage for file in files)
    if len(files) != ranks * stages:
        raise ConversionError(
            f"{folder} holds the files of {len(files)} ranks; {ranks} tensor-parallel ranks and {stages} stages make "
            f"{ranks * stages}. Copy the whole checkpoint."
        )
    first = files[0].content
    stored = arguments_of(first, folder)
    model = model_config(stored, true_vocabulary(first, stored, choices), rotary_is_sound=choices.rotary_is_sound)
    version = first.get("checkpoint_version", 0)
    order = RowOrder(float(version) if isinstance(version, int | float) else 0.0, gate_is_last(stored))
    tied = not model.untie_embeddings_and_output_weights
    offsets = _layer_offsets(files)
    weights = [
        (file.tensor_rank, _global_layer(name, offsets.get((file.stage, chunk), 0)), kind, part)
        for file in files
        for chunk, name, kind, part in _weights(file)
    ]
    parts = collect(weights, ranks, is_tied=tied, path=folder)
    moments, updates, notes = _moments(files, offsets, ranks, tied, folder)
    state = training_state(first, stored, updates) if moments else TrainingState(flags=training_flags(stored))
    return ForeignModel("Megatron-LM (torch)", folder, model, order, {**parts, **moments}, state, notes)


def arguments_of(content: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The stored arguments of the run.

    Raises:
        ConversionError: there are none.
    """
    stored = content.get("args")
    if not isinstance(stored, dict) or not stored:
        raise ConversionError(
            f"{path} holds no arguments of the run (args), which say what the network is. It is not a checkpoint of "
            "Megatron-LM or its forks."
        )
    return stored


def true_vocabulary(content: Mapping[str, Any], stored: Mapping[str, Any], choices: Choices) -> int:
    """Rows of the word embedding without padding: what the files say, else the tokenizer's tokens."""
    for place in (content.get("checkpoint_info"), content.get("universal_checkpoint_info")):
        size = place.get("original_vocab_size") if isinstance(place, dict) else None
        if type(size) is int and size > 0:
            return size
    return choices.vocab_size


def _rank_files(folder: Path) -> Iterator[RankFile]:
    paths: list[tuple[int, int, Path]] = []
    for path in sorted(folder.glob("mp_rank_*")):
        match = _RANK_FOLDER.fullmatch(path.name)
        if match is None:
            raise ConversionError(
                f"{path} is of a layout that is not known: folders are mp_rank_TT or mp_rank_TT_PPP (expert-parallel "
                "checkpoints are not converted)."
            )
        file = next((path / name for name in _FILES if (path / name).is_file()), None)
        if file is None:
            raise ConversionError(f"{path} holds no {_FILES[0]}. Copy the whole checkpoint.")
        paths.append((int(match.group(1)), int(match.group(2) or 0), file))
    contents = read_pickles([file for _, _, file in paths])
    for (rank, stage, file), content in zip(paths, contents, strict=True):
        if not isinstance(content, dict):
            raise ConversionError(f"{file} does not hold a dictionary, so it is not a checkpoint of Megatron-LM.")
        yield RankFile(rank, stage, content)


def chunks_of(file: RankFile) -> dict[int, Any]:
    """The parts of the network in a file: `model`, or `model0`, `model1`, ... of an interleaved pipeline."""
    if "model" in file.content:
        return {0: file.content["model"]}
    return {
        int(name.removeprefix("model")): value
        for name, value in file.content.items()
        if isinstance(name, str) and re.fullmatch(r"model\d+", name)
    }


def _layer_offsets(files: list[RankFile]) -> dict[tuple[int, int], int]:
    """The number of the first block of each (stage, chunk): layers are numbered from 0 in each of them."""
    counts: dict[tuple[int, int], int] = {}
    for file in files:
        for chunk, tree in chunks_of(file).items() if file.tensor_rank == 0 else ():
            layers = {match.group(2) for name, _ in tensors_in(tree) if (match := _LAYER.fullmatch(name))}
            counts[chunk, file.stage] = len(layers)
    offsets, done = {}, 0
    for chunk, stage in sorted(counts):
        offsets[stage, chunk] = done
        done += counts[chunk, stage]
    return offsets


def _global_layer(name: str, offset: int) -> str:
    match = _LAYER.fullmatch(name)
    return f"{match.group(1)}{int(match.group(2)) + offset}{match.group(3)}" if match else name


def _weights(file: RankFile) -> Iterator[tuple[int, str, Kind, Part]]:
    for chunk, tree in chunks_of(file).items():
        for name, tensor in tensors_in(tree):
            yield chunk, name, "weight", Part.of(tensor)


def _moments(
    files: list[RankFile], offsets: Mapping[tuple[int, int], int], ranks: int, is_tied: bool, folder: Path
) -> tuple[Parts, int | None, tuple[str, ...]]:
    """The fp32 weights and moments, Adam's count of updates, and why there are none."""
    listed, updates = [], None
    for file in files:
        optimizer = file.content.get("optimizer")
        if not isinstance(optimizer, dict):
            return {}, None, ("the files hold no optimizer state, so only weights are imported",)
        named: dict[str, ForeignTensor] = {
            _global_layer(name, offsets.get((file.stage, chunk), 0)): tensor
            for chunk, tree in chunks_of(file).items()
            for name, tensor in tensors_in(tree)
        }
        found = moments_of(optimizer, named)
        if isinstance(found, str):
            return {}, None, (f"{found}, so only weights are imported",)
        updates = found.updates
        listed += [(file.tensor_rank, name, kind, Part.of(tensor)) for name, kind, tensor in found.tensors]
    return collect(listed, ranks, is_tied=is_tied, path=folder), updates, ()
