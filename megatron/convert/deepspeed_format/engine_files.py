"""Reads what DeepSpeed's engines save: layer files of a pipeline or modules of ranks, with their optimizer shards.

Source: DeepSpeed 0.19.8, `deepspeed/runtime/engine.py` (`save_checkpoint`), `deepspeed/runtime/pipe/module.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.convert.deepspeed_format.zero import OptimizerShards, read_shards, shapes_of
from megatron.convert.megatron_format.architecture import gate_is_last, model_config
from megatron.convert.megatron_format.model import ForeignModel, Part, Parts, TrainingState, collect
from megatron.convert.megatron_format.tensors import RowOrder
from megatron.convert.megatron_format.torch_files import Choices, arguments_of, true_vocabulary
from megatron.convert.megatron_format.training import training_flags, training_state
from megatron.convert.pickles.reader import read_pickles, tensors_in
from megatron.errors import ConversionError
from megatron.parallel.pieces import Kind

_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_EXPERT = re.compile(r"layer_\d+.*_expert_.*model_states\.pt")
_RANK = re.compile(r"(?:zero_pp_rank_0_)?mp_rank_(\d+)_model_states\.pt")

Listed = list[tuple[int, str, Kind, Part]]


@dataclass(frozen=True)
class RankFiles:
    """The model files of a folder by model-parallel rank, and the layer files by (layer, tensor-parallel rank)."""

    ranks: Mapping[int, Mapping[str, Any]]
    layers: Mapping[tuple[int, int], Any]

    @property
    def tensor_ranks(self) -> int:
        """Tensor-parallel ranks that wrote the checkpoint; without layer files there is no pipeline."""
        return 1 + max(rank for _, rank in self.layers) if self.layers else len(self.ranks)


def is_engine_folder(folder: Path) -> bool:
    """Whether a folder holds files of DeepSpeed's engines."""
    return any(_RANK.fullmatch(path.name) or _LAYER.fullmatch(path.name) for path in folder.iterdir())


def open_engine_folder(folder: Path, choices: Choices) -> ForeignModel:
    """Opens a `global_step100` folder.

    Raises:
        ConversionError: files are missing, or the network is not one of ours.
        CheckpointError: a file is damaged or holds what is not admitted.
    """
    files = _read_files(folder)
    first = files.ranks[0]
    stored = arguments_of(first, folder)
    model = model_config(stored, true_vocabulary(first, stored, choices), rotary_is_sound=choices.rotary_is_sound)
    ranks, tied = files.tensor_ranks, not model.untie_embeddings_and_output_weights
    shards = read_shards(folder, {rank: shapes_of(content) for rank, content in files.ranks.items()})
    listed: Listed = [(rank % ranks, name, kind, part) for rank, name, kind, part in shards.tensors]
    exact = collect(listed, ranks, is_tied=tied, path=folder)
    parts: Parts = {**collect(_weights(files), ranks, is_tied=tied, path=folder), **exact}
    has_moments = any(kind == "exp_avg" for _, kind in exact)
    state = TrainingState(flags=training_flags(stored))
    if has_moments:
        state = training_state(first, stored, shards.updates, shards.loss_scale)
    order = RowOrder(gate_last=gate_is_last(stored))
    return ForeignModel("DeepSpeed", folder, model, order, parts, state, _notes(shards, has_moments))


def _notes(shards: OptimizerShards, has_moments: bool) -> tuple[str, ...]:
    if has_moments:
        return ()
    return (f"{shards.problem or 'the optimizer states hold no moments'}; only weights are imported",)


def _read_files(folder: Path) -> RankFiles:
    ranks: dict[int, Path] = {}
    layers: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.iterdir()):
        if _EXPERT.fullmatch(path.name):
            raise ConversionError(f"{path} holds experts; networks with experts are not converted from this format.")
        if match := _LAYER.fullmatch(path.name):
            layers[int(match.group(1)), int(match.group(2))] = path
        elif match := _RANK.fullmatch(path.name):
            ranks[int(match.group(1))] = path
    if 0 not in ranks or len(ranks) != 1 + max(ranks):
        raise ConversionError(
            f"{folder} holds the model files of ranks {', '.join(map(str, sorted(ranks))) or 'none'}; they must begin "
            "with mp_rank_00_model_states.pt and be complete. Copy the whole checkpoint."
        )
    contents = read_pickles([*ranks.values(), *layers.values()])
    for path, content in zip([*ranks.values(), *layers.values()], contents, strict=True):
        if not isinstance(content, dict):
            raise ConversionError(f"{path} does not hold a dictionary, so it is not a file of DeepSpeed's engine.")
    return RankFiles(
        dict(zip(ranks, contents[: len(ranks)], strict=True)), dict(zip(layers, contents[len(ranks) :], strict=True))
    )


def _weights(files: RankFiles) -> Iterator[tuple[int, str, Kind, Part]]:
    for (layer, rank), content in files.layers.items():
        for name, tensor in tensors_in(content):
            yield rank, f"{layer}.{name}", "weight", Part.of(tensor)
    for rank, content in files.ranks.items() if not files.layers else ():
        for name, tensor in tensors_in(content.get("module")):
            yield rank, name, "weight", Part.of(tensor)
