"""Reads DeepSpeed's universal checkpoints: whole fp32 tensors and moments, one folder per parameter.

Source: DeepSpeed 0.19.8, `deepspeed/checkpoint/ds_to_universal.py`; bigscience Megatron-DeepSpeed,
`tools/convert_checkpoint/ds_to_universal.py` (its first version).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.config import ModelConfig
from megatron.errors import ConversionError
from megatron.parallel.pieces import Kind
from trident.convert.megatron_format.arguments import training_state
from trident.convert.megatron_format.foreign_model import ForeignModel, RankPart, StoredParts, count_of, highest_step
from trident.convert.megatron_format.torch_files import ImportOptions, StoredRun, read_dictionaries
from trident.convert.pickles.reader import ForeignTensor, read_pickles

_FILES: dict[str, Kind] = {"fp32.pt": "weight", "exp_avg.pt": "exp_avg", "exp_avg_sq.pt": "exp_avg_sq"}
_GATED = ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias")


def is_universal(folder: Path) -> bool:
    """True if a folder is a universal checkpoint."""
    return (folder / "zero").is_dir()


def open_universal(folder: Path, choices: ImportOptions) -> ForeignModel:
    """Opens a universal checkpoint; raises as `open_foreign` does."""
    path = next(iter(sorted(folder.glob("mp_rank_*_model_states.pt"))), None)
    if path is None:
        raise ConversionError(f"{folder} holds no mp_rank_00_model_states.pt, which has the arguments of the run.")
    (first,) = read_dictionaries([path], "a file of DeepSpeed's engine")
    run = StoredRun.of(first, folder, choices)
    paths = [path for path in sorted((folder / "zero").glob("*/*.pt")) if path.name in _FILES]
    listed = [
        (0, path.parent.name, _FILES[path.name], _whole(content, path), content)
        for path, content in zip(paths, read_pickles(paths), strict=True)
    ]
    parts = run.parts(entry[:4] for entry in listed)
    notes: list[str] = []
    if not any("cat_dim" in content for *_, content in listed):  # the first version concatenates the shards
        ranks = run.stored.get("tensor_model_parallel_size")
        parts = _split_first_version(parts, run.model, ranks if type(ranks) is int and ranks > 0 else 1, notes)
    return run.opened("DeepSpeed universal", parts, training_state(first, run.stored, _updates(folder)), notes)


def _whole(content: Any, path: Path) -> RankPart:
    tensor = content.get("param") if isinstance(content, dict) else content
    if not isinstance(tensor, ForeignTensor):
        raise ConversionError(f"{path} holds no tensor (param), so it is not part of a universal checkpoint.")
    return RankPart.of(tensor)


def _split_first_version(parts: StoredParts, model: ModelConfig, ranks: int, notes: list[str]) -> StoredParts:
    """Undoes the concatenation of shards along rows by bigscience's converter.

    It repeats the position embedding for each rank, and stores both halves of a gated matrix rank by rank.
    """
    divided: StoredParts = {}
    for (name, kind), (part,) in parts.items():
        if name == "embedding.position_embeddings.weight" and part.shape[0] == ranks * model.max_position_embeddings:
            divided[name, kind] = (_rows(part, 0, model.max_position_embeddings),)
            if ranks > 1 and not notes:
                notes.append(f"the position embedding is stored {ranks} times, once per rank; the first is used")
        elif model.gated_linear_unit and name.endswith(_GATED) and part.shape[0] % ranks == 0:
            share = part.shape[0] // ranks
            divided[name, kind] = tuple(_rows(part, rank * share, (rank + 1) * share) for rank in range(ranks))
        else:
            divided[name, kind] = (part,)
    return divided


def _rows(part: RankPart, first: int, last: int) -> RankPart:
    return RankPart((last - first, *part.shape[1:]), part.dtype, lambda: part.read()[first:last])


def _updates(folder: Path) -> int | None:
    """Adam's step counter, from `step.pt` of a parameter or the common file of parameter groups."""
    steps = next(iter(sorted((folder / "zero").glob("*/step.pt"))), None)
    if steps is not None:
        (content,) = read_pickles([steps])
        return count_of(content.get("param") if isinstance(content, dict) else content)
    groups_file = folder / "zero" / "optimizer_state.pt"
    if not groups_file.is_file():
        return None
    (content,) = read_pickles([groups_file])
    groups = content.get("param_groups") if isinstance(content, dict) else None
    return highest_step(groups if isinstance(groups, list) else [])
