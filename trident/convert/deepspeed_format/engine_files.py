"""Reads checkpoints of DeepSpeed's engines: pipeline layer files or rank modules, with optimizer shards.

The shards contain fp32 weights and moments of ZeRO 1, 2 and 3, and of the BF16 optimizer.

Source: DeepSpeed 0.19.8, `deepspeed/runtime/engine.py` (`save_checkpoint`), `deepspeed/runtime/pipe/module.py`,
`deepspeed/checkpoint/ds_to_universal.py` (`extract_zero_shards` and its stage-3 form).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.errors import ConversionError
from megatron.parallel.pieces import Kind
from trident.convert.megatron_format.arguments import training_state
from trident.convert.megatron_format.foreign_model import ForeignModel, RankPart, highest_step
from trident.convert.megatron_format.torch_files import ImportOptions, StoredRun, read_dictionaries
from trident.convert.pickles.reader import ForeignObject, ForeignTensor, read_pickles, tensors_in

RankFiles = dict[int, dict[str, Any]]
LayerFiles = dict[tuple[int, int], dict[str, Any]]  # by layer and tensor-parallel rank
Shapes = Sequence[Mapping[str, tuple[int, ...]]]

_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_EXPERT = re.compile(r"layer_\d+.*_expert_.*model_states\.pt")
_RANK = re.compile(r"(?:zero_pp_rank_0_)?mp_rank_(\d+)_model_states\.pt")
_SHARD = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_FLAT: tuple[tuple[Kind, str], ...] = (("weight", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"))
_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def is_engine_folder(folder: Path) -> bool:
    """True if a folder contains files of DeepSpeed's engines."""
    return any(_RANK.fullmatch(path.name) or _LAYER.fullmatch(path.name) for path in folder.iterdir())


def open_engine_folder(folder: Path, choices: ImportOptions) -> ForeignModel:
    """Opens a `global_step100` folder; raises as `open_foreign` does."""
    files, layers = _read_files(folder)
    run = StoredRun.of(files[0], folder, choices)
    ranks = 1 + max(rank for _, rank in layers) if layers else len(files)  # no pipeline without layer files
    shards = read_shards(folder, {rank: shapes_of(content) for rank, content in files.items()})
    exact = run.parts(((rank % ranks, name, kind, part) for rank, name, kind, part in shards.tensors), ranks)
    parts = {**run.parts(_weights(files, layers), ranks), **exact}
    if any(kind == "exp_avg" for _, kind in exact):
        state = training_state(files[0], run.stored, shards.updates, shards.loss_scale)
        return run.opened("DeepSpeed", parts, state)
    note = f"{shards.problem or 'the optimizer states hold no moments'}; only weights are imported"
    return run.opened("DeepSpeed", parts, None, (note,))


@dataclass
class OptimizerShards:
    """The contents of a checkpoint's optimizer files.

    Args:
        tensors: (model-parallel rank, name, kind, part).
        updates: Adam's step counter.
        problem: why they cannot be read, if so.
    """

    tensors: list[tuple[int, str, Kind, RankPart]] = field(default_factory=list)
    updates: int | None = None
    loss_scale: dict[str, float] = field(default_factory=dict)
    problem: str | None = None


def read_shards(folder: Path, shapes: Mapping[int, Shapes]) -> OptimizerShards:
    """Opens the optimizer files of a checkpoint folder; tensors are read lazily.

    Args:
        shapes: the parameter shapes of each model-parallel rank by group, in the order of the flat tensors.

    Raises:
        ConversionError: shards are missing or do not match the shapes.
    """
    paths = {
        (int(match.group(2)), int(match.group(1))): path
        for path in folder.iterdir()
        if (match := _SHARD.fullmatch(path.name))
    }
    if not paths:
        return OptimizerShards(problem="the folder holds no optimizer states of ZeRO")
    ordered = sorted(paths)
    contents = dict(zip(ordered, read_pickles([paths[key] for key in ordered]), strict=True))
    shards = OptimizerShards()
    for rank, groups in shapes.items():
        states = [_state(contents[key], paths[key]) for key in ordered if key[0] == rank]
        count = states[0].get("partition_count") if states else None
        expected = max(count) if isinstance(count, list) and count else count
        if not states or (type(expected) is int and expected != len(states)):
            raise ConversionError(
                f"{folder} holds {len(states)} optimizer shards of model-parallel rank {rank}, not {expected or 'any'}."
                " Copy the whole checkpoint."
            )
        if "fp32_flat_groups" in states[0]:
            fragments = _stage_three(states, groups)
        elif "param_slice_mappings" in states[0]:
            fragments = _stages_one_and_two(states)
        else:
            return OptimizerShards(problem="the optimizer states lack parameter offsets (older DeepSpeed)")
        shards.tensors += [(rank, name, kind, part) for name, kind, part in _parts(fragments, groups, folder)]
        counted = _updates(states[0])
        shards.updates = counted if shards.updates is None else max(shards.updates, counted or 0)
        shards.loss_scale = _loss_scale(states[0])
    return shards


def shapes_of(content: Mapping[str, Any]) -> Shapes:
    """The shapes of a rank's parameters by group, from its model file."""
    groups = content.get("param_shapes")
    groups = [groups] if isinstance(groups, dict) else groups
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return []
    return groups


def _read_files(folder: Path) -> tuple[RankFiles, LayerFiles]:
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
            f"{folder} holds the model files of ranks {', '.join(map(str, sorted(ranks))) or 'none'}; they must start "
            "with mp_rank_00_model_states.pt and be complete. Copy the whole checkpoint."
        )
    contents = read_dictionaries([*ranks.values(), *layers.values()], "a file of DeepSpeed's engine")
    return dict(zip(ranks, contents, strict=False)), dict(zip(layers, contents[len(ranks) :], strict=True))


def _weights(ranks: RankFiles, layers: LayerFiles) -> Iterator[tuple[int, str, Kind, RankPart]]:
    for (layer, rank), content in layers.items():
        for name, tensor in tensors_in(content):
            yield rank, f"{layer}.{name}", "weight", RankPart.of(tensor)
    for rank, content in ranks.items() if not layers else ():
        for name, tensor in tensors_in(content.get("module")):
            yield rank, name, "weight", RankPart.of(tensor)


@dataclass(frozen=True)
class _Fragment:
    """The elements of a parameter in a flat tensor."""

    flat: ForeignTensor
    first: int
    numel: int


def _state(content: Any, path: Path) -> Mapping[str, Any]:
    state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise ConversionError(f"{path} holds no optimizer_state_dict, so it is not an optimizer file of DeepSpeed.")
    return state


def _stages_one_and_two(states: Sequence[Mapping[str, Any]]) -> Fragments:
    for state in states:
        inner = _adam(state)
        for group, mapping in enumerate(state["param_slice_mappings"]):
            flats = {"fp32": state["single_partition_of_fp32_groups"][group], **inner.get(group, {})}
            for name, address in mapping.items() if isinstance(mapping, dict) else ():
                fields = address.fields() if isinstance(address, ForeignObject) else {}
                for kind, key in _FLAT:
                    if isinstance(flats.get(key), ForeignTensor):
                        yield name, kind, _Fragment(flats[key], fields.get("start", 0), fields.get("numel", 0))


def _stage_three(states: Sequence[Mapping[str, Any]], groups: Shapes) -> Fragments:
    for rank, state in enumerate(states):
        inner = _adam(state)
        for group, shapes in enumerate(groups):
            flats = {"fp32": state["fp32_flat_groups"][group], **inner.get(group, {})}
            offset = 0
            for name, shape in shapes.items():
                numel = math.prod(shape)
                share = -(-numel // len(states))
                held = max(0, min(share, numel - rank * share))
                for kind, key in _FLAT:
                    if isinstance(flats.get(key), ForeignTensor):
                        yield name, kind, _Fragment(flats[key], offset, held)
                offset += share


def _adam(state: Mapping[str, Any]) -> Mapping[Any, Mapping[str, Any]]:
    """The state of torch's optimizer by index of the flat tensor."""
    inner = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    tensors = inner.get("state") if isinstance(inner, dict) else None
    return tensors if isinstance(tensors, dict) else {}


def _parts(named: Fragments, groups: Shapes, folder: Path) -> Iterator[tuple[str, Kind, RankPart]]:
    shapes = {name: shape for group in groups for name, shape in group.items()}
    fragments: dict[tuple[str, Kind], list[_Fragment]] = defaultdict(list)
    for name, kind, fragment in named:
        fragments[name, kind].append(fragment)
    for (name, kind), held in fragments.items():
        shape = shapes.get(name)
        numel = sum(fragment.numel for fragment in held)
        if shape is None or numel != math.prod(shape):
            raise ConversionError(
                f"the optimizer shards in {folder} hold {numel} elements of {name} ({kind}), whose shape is "
                f"{'not stored' if shape is None else list(shape)}. Shards are missing; copy the whole checkpoint."
            )
        for fragment in held:
            if fragment.first < 0 or fragment.first + fragment.numel > fragment.flat.numel:
                raise ConversionError(
                    f"an optimizer shard in {folder} should hold elements up to {fragment.first + fragment.numel} for "
                    f"{name}, and has {fragment.flat.numel}. It is damaged."
                )
        yield name, kind, _part(tuple(shape), held)


def _part(shape: tuple[int, ...], fragments: Sequence[_Fragment]) -> RankPart:
    def read() -> torch.Tensor:
        parts = [
            fragment.flat.flat(fragment.first, fragment.first + fragment.numel)
            for fragment in fragments
            if fragment.numel
        ]
        return torch.cat(parts).reshape(shape)

    return RankPart(shape, fragments[0].flat.dtype, read)


def _updates(state: Mapping[str, Any]) -> int | None:
    """Adam's step counter in the state of a tensor or a parameter group; None if missing."""
    inner = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    groups = inner.get("param_groups", []) if isinstance(inner, dict) else []
    return highest_step([*_adam(state).values(), *groups])


def _loss_scale(state: Mapping[str, Any]) -> dict[str, float]:
    scaler = state.get("loss_scaler")
    fields = scaler.fields() if isinstance(scaler, ForeignObject) else {}
    return {name: fields[name] for name in _SCALER_FIELDS if isinstance(fields.get(name), int | float)}


Fragments = Iterator[tuple[str, Kind, _Fragment]]
