"""Adam's moments in a `torch` layout file: torch's optimizer numbers its tensors, so their order gives the names.

The two parameter groups are what `get_params_for_weight_decay_optimization` makes: matrices, then biases and norms,
each in the order of the network's modules, which is that of the stored weights.

Source: NVIDIA Megatron-LM `megatron/optimizer/__init__.py`; bigscience Megatron-DeepSpeed `megatron/optimizer/
optimizer.py` (`FP32Optimizer`, `Float16OptimizerWithFloat16Params`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.convert.pickles.reader import ForeignTensor
from megatron.parallel.pieces import Kind


@dataclass(frozen=True)
class StoredMoments:
    """What was found: (name, kind, tensor) of everything, and the updates that Adam counted."""

    tensors: list[tuple[str, Kind, ForeignTensor]]
    updates: int | None


def moments_of(optimizer: Mapping[str, Any], weights: Mapping[str, ForeignTensor]) -> StoredMoments | str:
    """The moments of the weights of one file, or a sentence that says why they cannot be told apart.

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
    found: list[tuple[str, Kind, ForeignTensor]] = []
    updates = _count(inner.get("step"))
    named = _named_groups(weights, groups)
    if named is None:
        return "the optimizer's parameter groups are not those of the stored weights"
    for place, (group, names) in enumerate(zip(groups, named, strict=True)):
        updates = max(updates or 0, _count(group.get("step")) or 0) or updates
        for position, (number, name) in enumerate(zip(group["params"], names, strict=True)):
            state = states.get(number)
            if not isinstance(state, dict) or not _fits(state, weights[name]):
                return f"the optimizer state of {name} does not have its shape"
            found += [(name, "exp_avg", state["exp_avg"]), (name, "exp_avg_sq", state["exp_avg_sq"])]
            updates = max(updates or 0, _count(state.get("step")) or 0) or updates
            if isinstance(masters, list) and place < len(masters) and position < len(masters[place]):
                found.append((name, "weight", masters[place][position]))
    return StoredMoments(found, updates)


def _named_groups(weights: Mapping[str, ForeignTensor], groups: Sequence[Any]) -> list[list[str]] | None:
    """The names of the tensors in each parameter group."""
    vectors = [name for name, tensor in weights.items() if len(tensor.shape) == 1]
    matrices = [name for name, tensor in weights.items() if len(tensor.shape) > 1]
    lengths = [len(group.get("params", ())) if isinstance(group, dict) else -1 for group in groups]
    if lengths == [len(matrices) + len(vectors)]:
        return [list(weights)]
    if len(lengths) != 2:
        return None
    decays = [_decay(group) for group in groups]
    ordered = [matrices, vectors] if decays[0] >= decays[1] else [vectors, matrices]
    return ordered if lengths == [len(names) for names in ordered] else None


def _decay(group: Mapping[str, Any]) -> float:
    value = group.get("weight_decay", 0.0) * group.get("wd_mult", 1.0)
    return float(value)


def _fits(state: Mapping[str, Any], weight: ForeignTensor) -> bool:
    return all(
        isinstance(state.get(name), ForeignTensor) and state[name].shape == weight.shape
        for name in ("exp_avg", "exp_avg_sq")
    )


def _count(value: Any) -> int | None:
    if isinstance(value, ForeignTensor):
        value = int(value.read().item()) if value.numel == 1 else None
    return value if type(value) is int and value >= 0 else int(value) if isinstance(value, float) else None
