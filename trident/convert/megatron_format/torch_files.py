"""Reads Megatron-LM's `torch` layout: `iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt`.

torch's optimizer numbers its tensors, so the names of the moments follow from their order: two parameter groups
(`get_params_for_weight_decay_optimization`), matrices, then biases and norms, each in the order of the network's
modules, which is also the order of the stored weights.

Source: NVIDIA Megatron-LM `megatron/checkpointing.py`, `megatron/optimizer/__init__.py`; bigscience Megatron-DeepSpeed
`megatron/checkpointing.py`, `megatron/optimizer/optimizer.py` (`FP32Optimizer`, `Float16OptimizerWithFloat16Params`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import ModelConfig
from megatron.errors import ConversionError
from megatron.parallel.pieces import Kind
from trident.convert.megatron_format.arguments import gate_is_last, model_config, training_flags, training_state
from trident.convert.megatron_format.foreign_model import (
    ForeignModel,
    RankPart,
    StoredParts,
    TrainingState,
    collect,
    count_of,
)
from trident.convert.megatron_format.sharding_rules import CURRENT_VERSION, StoredRowOrder
from trident.convert.pickles.reader import ForeignTensor, read_pickles, tensors_in

_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")


@dataclass(frozen=True)
class ImportOptions:
    """Options of the user for reading a foreign checkpoint.

    Args:
        vocab_size: size of the tokenizer, for files that do not store the number of padding rows.
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
    """True if a folder contains `mp_rank_XX/model_optim_rng.pt`."""
    return any((path / name).is_file() for path in folder.glob("mp_rank_*") for name in _FILES)


def open_torch_layout(folder: Path, choices: ImportOptions) -> ForeignModel:
    """Opens a checkpoint in the `torch` layout; raises as `open_foreign` does."""
    files = list(_rank_files(folder))
    ranks, stages = 1 + max(file.tensor_rank for file in files), 1 + max(file.stage for file in files)
    if len(files) != ranks * stages:
        raise ConversionError(
            f"{folder} holds the files of {len(files)} ranks; {ranks} tensor-parallel ranks and {stages} stages make "
            f"{ranks * stages}. Copy the whole checkpoint."
        )
    first = files[0].content
    tensors = _named_tensors(files)
    is_core = any(".linear_fc1." in name for named in tensors for name in named)
    run = StoredRun.of(first, folder, choices, is_core=is_core)
    parts = run.parts(
        (
            (file.tensor_rank, name, "weight", RankPart.of(tensor))
            for file, named in zip(files, tensors, strict=True)
            for name, tensor in named.items()
        ),
        ranks,
    )
    listed, updates, note = _moments(files, tensors)
    version = first.get("checkpoint_version", 0)
    return run.opened(
        "Megatron-LM (torch)",
        {**parts, **run.parts(listed, ranks)},
        training_state(first, run.stored, updates) if listed else None,
        () if note is None else (f"{note}, so only weights are imported",),
        float(version) if isinstance(version, int | float) else 0.0,
    )


@dataclass(frozen=True)
class StoredRun:
    """The run of a checkpoint, from its stored arguments.

    Args:
        stored: the arguments.
        model: the network they describe.
    """

    path: Path
    stored: Mapping[str, Any]
    model: ModelConfig

    @classmethod
    def of(cls, content: Mapping[str, Any], path: Path, choices: ImportOptions, *, is_core: bool = False) -> StoredRun:
        """The run described by a file.

        Raises:
            ConversionError: it has no arguments, or the network is not supported.
        """
        stored = content.get("args")
        if not isinstance(stored, dict) or not stored:
            raise ConversionError(
                f"{path} holds no arguments of the run (args), which describe the network. It is not a checkpoint of "
                "Megatron-LM or its forks."
            )
        rows = choices.vocab_size
        for info in (content.get("universal_checkpoint_info"), content.get("checkpoint_info")):
            size = info.get("original_vocab_size") if isinstance(info, dict) else None
            rows = size if type(size) is int and size > 0 else rows  # without padding
        model = model_config(stored, rows, rotary_is_sound=choices.rotary_is_sound, is_core=is_core)
        return cls(path, stored, model)

    def parts(self, stored: Iterable[tuple[int, str, Kind, RankPart]], ranks: int = 1) -> StoredParts:
        """The stored tensors by our names, see `collect`."""
        return collect(stored, ranks, is_tied=not self.model.untie_embeddings_and_output_weights, path=self.path)

    def opened(
        self,
        program: str,
        parts: StoredParts,
        state: TrainingState | None,
        notes: Sequence[str] = (),
        version: float = CURRENT_VERSION,
    ) -> ForeignModel:
        """The open checkpoint; the default training state has only the flags of the run."""
        order = StoredRowOrder(version, gate_is_last(self.stored))
        state = state or TrainingState(flags=training_flags(self.stored))
        return ForeignModel(program, self.path, self.model, order, parts, state, tuple(notes))


def read_dictionaries(paths: Sequence[Path], what: str) -> list[dict[str, Any]]:
    """Reads files that contain dictionaries.

    Args:
        what: description of the files, for the error.

    Raises:
        ConversionError: one does not contain a dictionary.
    """
    contents = read_pickles(paths)
    for path, content in zip(paths, contents, strict=True):
        if not isinstance(content, dict):
            raise ConversionError(f"{path} does not hold a dictionary, so it is not {what}.")
    return contents


def chunks_of(file: RankFile) -> dict[int, Any]:
    """The model chunks in a file: `model`, or `model0`, `model1`, ... of an interleaved pipeline."""
    if "model" in file.content:
        return {0: file.content["model"]}
    return {
        int(name.removeprefix("model")): value
        for name, value in file.content.items()
        if isinstance(name, str) and re.fullmatch(r"model\d+", name)
    }


@dataclass(frozen=True)
class StoredMoments:
    """All moments as (name, kind, tensor), and Adam's step counter."""

    tensors: list[tuple[str, Kind, ForeignTensor]]
    updates: int | None


def moments_of(optimizer: Mapping[str, Any], weights: Mapping[str, ForeignTensor]) -> StoredMoments | str:
    """The moments of the weights of one file, or the reason why they cannot be assigned.

    Args:
        optimizer: the file's optimizer entry.
        weights: the tensors of the network in the order of the file.
    """
    inner = optimizer.get("optimizer", optimizer)
    masters = optimizer.get("fp32_from_fp16_params")
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    states = inner.get("state") if isinstance(inner, dict) else None
    if not isinstance(groups, list) or not isinstance(states, dict) or not states:
        return "the optimizer state is not in this file (a distributed optimizer keeps it apart)"
    tensors: list[tuple[str, Kind, ForeignTensor]] = []
    updates = count_of(inner.get("step"))
    named = _named_groups(weights, groups)
    if named is None:
        return "the optimizer's parameter groups do not match the stored weights"
    for index, (group, names) in enumerate(zip(groups, named, strict=True)):
        updates = max(updates or 0, count_of(group.get("step")) or 0) or updates
        for position, (number, name) in enumerate(zip(group["params"], names, strict=True)):
            state = states.get(number)
            if not isinstance(state, dict) or not _fits(state, weights[name]):
                return f"the optimizer state of {name} does not have its shape"
            tensors += [(name, "exp_avg", state["exp_avg"]), (name, "exp_avg_sq", state["exp_avg_sq"])]
            updates = max(updates or 0, count_of(state.get("step")) or 0) or updates
            if isinstance(masters, list) and index < len(masters) and position < len(masters[index]):
                tensors.append((name, "weight", masters[index][position]))
    return StoredMoments(tensors, updates)


def _rank_files(folder: Path) -> Iterator[RankFile]:
    paths: list[tuple[int, int, Path]] = []
    for path in sorted(folder.glob("mp_rank_*")):
        match = _RANK_FOLDER.fullmatch(path.name)
        if match is None:
            raise ConversionError(
                f"{path} has an unknown layout: folders are mp_rank_TT or mp_rank_TT_PPP (expert-parallel checkpoints "
                "are not converted)."
            )
        file = next((path / name for name in _FILES if (path / name).is_file()), None)
        if file is None:
            raise ConversionError(f"{path} holds no {_FILES[0]}. Copy the whole checkpoint.")
        paths.append((int(match.group(1)), int(match.group(2) or 0), file))
    contents = read_dictionaries([file for _, _, file in paths], "a checkpoint of Megatron-LM")
    for (rank, stage, _), content in zip(paths, contents, strict=True):
        yield RankFile(rank, stage, content)


def _named_tensors(files: Sequence[RankFile]) -> list[dict[str, ForeignTensor]]:
    """The weights of each file; layers, numbered from 0 in each (stage, chunk), get their global numbers."""
    counts: dict[tuple[int, int], int] = {}
    for file in files:
        for chunk, tree in chunks_of(file).items() if file.tensor_rank == 0 else ():
            layers = {match.group(2) for name, _ in tensors_in(tree) if (match := _LAYER.fullmatch(name))}
            counts[chunk, file.stage] = len(layers)
    offsets, done = {}, 0
    for chunk, stage in sorted(counts):
        offsets[stage, chunk] = done
        done += counts[chunk, stage]
    named: list[dict[str, ForeignTensor]] = []
    for file in files:
        named.append({})
        for chunk, tree in chunks_of(file).items():
            for name, tensor in tensors_in(tree):
                if match := _LAYER.fullmatch(name):
                    name = f"{match[1]}{int(match[2]) + offsets.get((file.stage, chunk), 0)}{match[3]}"
                named[-1].setdefault(name, tensor)
    return named


def _moments(
    files: Sequence[RankFile], tensors: Sequence[Mapping[str, ForeignTensor]]
) -> tuple[list[tuple[int, str, Kind, RankPart]], int | None, str | None]:
    """The fp32 weights and moments and Adam's step counter, or the reason for missing ones."""
    listed, updates = [], None
    for file, named in zip(files, tensors, strict=True):
        optimizer = file.content.get("optimizer")
        if not isinstance(optimizer, dict):
            return [], None, "the files hold no optimizer state"
        moments = moments_of(optimizer, named)
        if isinstance(moments, str):
            return [], None, moments
        updates = moments.updates
        listed += [(file.tensor_rank, name, kind, RankPart.of(tensor)) for name, kind, tensor in moments.tensors]
    return listed, updates, None


def _named_groups(weights: Mapping[str, ForeignTensor], groups: Sequence[Any]) -> list[list[str]] | None:
    vectors = [name for name, tensor in weights.items() if len(tensor.shape) == 1]
    matrices = [name for name, tensor in weights.items() if len(tensor.shape) > 1]
    lengths = [len(group.get("params", ())) if isinstance(group, dict) else -1 for group in groups]
    if lengths == [len(matrices) + len(vectors)]:
        return [list(weights)]
    if len(lengths) != 2:
        return None
    decays = [float(group.get("weight_decay", 0.0) * group.get("wd_mult", 1.0)) for group in groups]
    ordered = [matrices, vectors] if decays[0] >= decays[1] else [vectors, matrices]
    return ordered if lengths == [len(names) for names in ordered] else None


def _fits(state: Mapping[str, Any], weight: ForeignTensor) -> bool:
    return all(
        isinstance(state.get(name), ForeignTensor) and state[name].shape == weight.shape
        for name in ("exp_avg", "exp_avg_sq")
    )
