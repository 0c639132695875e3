"""Validates the records in the files of a run: values of the wrong type or size are dropped before they are used.

The files of a run are untrusted, and a page of many runs must survive one malformed line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

LARGEST_WHOLE = 2**53 - 1  # Number.MAX_SAFE_INTEGER
LONGEST_SECONDS = 1e9
# Fields of a step that are used for more than a curve, and their upper limits.
_LIMITS = (("consumed_tokens", float(LARGEST_WHOLE)), ("seconds_per_iteration", LONGEST_SECONDS))
_LATEST_AT = 1e11
_MOST_RANKS = 65_536
_DEEPEST = 32


def whole(value: Any, least: int = 0, most: int = LARGEST_WHOLE) -> int | None:
    """The value if it is an integer within the limits."""
    return value if type(value) is int and least <= value <= most else None


def number(value: Any, least: float = -math.inf, most: float = math.inf) -> float | None:
    """The value if it is a finite number within the limits."""
    is_number = type(value) in (int, float) and least <= value <= most
    return float(value) if is_number and math.isfinite(value) else None


def metric_records(values: Iterable[Any]) -> list[dict[str, Any]]:
    """The valid records of `metrics.jsonl`; a step or evaluation must have a step number."""
    records = []
    for value in values:
        kind = value.get("kind") if isinstance(value, dict) else None
        if kind == "step":
            if whole(value.get("iteration")) is not None:
                records.append(_step(value))
        elif kind in ("evaluation", "task"):
            if whole(value.get("iteration")) is not None:
                records.append(_evaluation(value))
        elif isinstance(kind, str):
            records.append(_event(value))
    return records


def event_records(values: Iterable[Any]) -> list[dict[str, Any]]:
    """The valid records of `events.jsonl`."""
    return [_event(value) for value in values if isinstance(value, dict) and isinstance(value.get("kind"), str)]


def sample_records(values: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """The valid records of `samples.jsonl`: the step and pairs of prompt and continuation."""
    for value in values:
        iteration = whole(value.get("iteration")) if isinstance(value, dict) else None
        if iteration is None:
            continue
        entries = value.get("samples")
        texts = [
            {"prompt": entry["prompt"], "text": entry["text"]}
            for entry in (entries if isinstance(entries, list) else [])
            if isinstance(entry, dict) and isinstance(entry.get("prompt"), str) and isinstance(entry.get("text"), str)
        ]
        yield {"iteration": iteration, "at": number(value.get("at"), 0.0, _LATEST_AT), "samples": texts}


def heartbeats_record(value: Mapping[str, Any]) -> dict[str, Any]:
    """The valid fields of `heartbeats.json`: the sizes of the axes, and the position of each rank."""
    axes, ranks = value.get("axes"), value.get("ranks")
    pairs = (pair for pair in (axes if isinstance(axes, list) else []) if isinstance(pair, list) and len(pair) == 2)
    sizes = _sizes({name: size for name, size in pairs if isinstance(name, str)})
    entries = []
    for one in ranks if isinstance(ranks, list) else []:
        rank = whole(one.get("rank"), most=_MOST_RANKS) if isinstance(one, dict) else None
        if rank is not None:
            entry: dict[str, Any] = {name: one[name] for name in ("phase", "state") if isinstance(one.get(name), str)}
            entry |= {"step": whole(one.get("step"))}
            entry |= {"idle_seconds": number(one.get("idle_seconds"), 0.0, LONGEST_SECONDS)}
            entries.append({"rank": rank, **{name: part for name, part in entry.items() if part is not None}})
    return {"axes": list(sizes.items()), "ranks": entries[:_MOST_RANKS]}


def layout(config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of the axes in a configuration; empty if they are more ranks than can be drawn."""
    parallel = config.get("parallel")
    if not isinstance(parallel, dict):
        return {}
    names = {"pp": "pipeline_model_parallel_size", "dp": "data_parallel_size", "tp": "tensor_model_parallel_size"}
    return _sizes({axis: whole(parallel.get(name), 1) or 1 for axis, name in names.items()})


def is_shallow(value: Any) -> bool:
    """True if the nesting of a value is far below the recursion limit."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            part
            for one in level
            if isinstance(one, (dict, list))
            for part in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return True
    return False


def _step(record: dict[str, Any]) -> dict[str, Any]:
    # Changed in place: a run may have millions of steps.
    for name, most in _LIMITS:
        value: Any = record.get(name)
        kind = type(value)
        if not ((kind is int or kind is float) and 0.0 <= value <= most):  # false for NaN
            record.pop(name, None)
    return record


def _evaluation(record: dict[str, Any]) -> dict[str, Any]:
    texts = {name: record[name] for name in ("group", "task") if isinstance(record.get(name), str)}
    kept: dict[str, Any] = {name: record[name] for name in ("kind", "iteration", "lm_loss") if name in record}
    tokens = number(record.get("consumed_tokens"), 0.0, LARGEST_WHOLE)
    figures = record.get("figures")
    return {**kept, **texts, "consumed_tokens": tokens, "figures": figures if isinstance(figures, dict) else {}}


def _event(record: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"kind": record["kind"], "at": number(record.get("at"), 0.0, _LATEST_AT)}
    for name in ("step", "iteration", "world_size", "first_sample", "last_sample"):
        values[name] = whole(record.get(name))
    return {**values, "text": record["text"] if isinstance(record.get("text"), str) else ""}


def _sizes(sizes: Mapping[str, Any]) -> dict[str, int]:
    known = {name: size for name, size in sizes.items() if whole(size, 1, _MOST_RANKS) is not None}
    return known if math.prod(known.values()) <= _MOST_RANKS else {}
