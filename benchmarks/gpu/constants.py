"""The constants of the planner for a device, from the training steps and the copy that a page has measured of it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu.shapes import SHAPES
from megatron.errors import ConfigError
from megatron.files.replacing import write_atomically
from trident.plan.hardware import Device, device_of
from trident.plan.requests import cluster_of, job_of, layout_of, read_plan_request
from trident.plan.search import LayoutEstimate, estimate

TOKENS = 16384  # of a step, in one pass
# What is fitted. Where products and attention are half as fast is left as it is: few steps say little about it.
FITTED = ("product_share", "attention_share", "traffic_share", "host_seconds_per_layer", "host_seconds_per_step")
# The error of a measured step, and how far a constant is expected to be from that of the device it begins with.
_STEP_ERROR, _CONSTANT_ERROR = 0.02, 0.3
_SLOWER_HOST = 10.0
_ROUNDS = 30


class MeasuredStep(NamedTuple):
    """A training step of one device: a network of `SHAPES`, the tokens of a sample, and how many a second."""

    network: str
    length: int
    tokens_per_second: float


def planned_step(step: MeasuredStep, device: Device) -> LayoutEstimate:
    """The planner's prediction for the step."""
    flags = [*SHAPES[step.network].flags, "--bf16", "--seq-length", str(step.length)]
    flags += ["--max-position-embeddings", str(step.length), "--micro-batch-size", str(TOKENS // step.length)]
    _, request = read_plan_request(flags)
    cluster = dataclasses.replace(cluster_of(request, 1), device=device)
    return estimate(job_of(request, cluster), layout_of(request, 1))


def fitted(steps: Sequence[MeasuredStep], begin: Device) -> Device:
    """The device whose constants give these steps, as near to those of `begin` as the steps allow.

    Least squares of logarithms, by Gauss and Newton; once from a host that is as fast, and once from a slower one that
    all steps wait for, because a host that no step waits for does not change them.
    """
    measured = np.array([math.log(TOKENS / step.tokens_per_second) for step in steps])
    prior = np.array([math.log(getattr(begin, name)) for name in FITTED])
    jobs = [planned_step(step, begin) for step in steps]

    def residuals(values: np.ndarray) -> np.ndarray:
        device = _with(begin, values)
        times = []
        for each in jobs:
            job = dataclasses.replace(each.job, cluster=dataclasses.replace(each.job.cluster, device=device))
            times.append(math.log(estimate(job, each.layout).time.seconds))
        return np.concatenate([(np.array(times) - measured) / _STEP_ERROR, (values - prior) / _CONSTANT_ERROR])

    slower = np.array([name.startswith("host") * math.log(_SLOWER_HOST) for name in FITTED])
    found = [_minimum(residuals, prior), _minimum(residuals, prior + slower)]
    return _with(begin, min(found, key=lambda values: float(np.sum(residuals(values) ** 2))))


def _minimum(residuals: Callable[[np.ndarray], np.ndarray], values: np.ndarray) -> np.ndarray:
    """The least sum of squares from some values on."""
    step_size = 1e-4
    for _ in range(_ROUNDS):
        now = residuals(values)
        slopes = [(residuals(values + step_size * axis) - now) / step_size for axis in np.eye(len(values))]
        change = np.linalg.lstsq(np.stack(slopes, axis=1), -now, rcond=None)[0]
        while np.sum(residuals(values + change) ** 2) > np.sum(now**2) and np.abs(change).max() > 1e-6:
            change /= 2
        values = values + change
        if np.abs(change).max() < 1e-5:
            break
    return values


def write_constants(records: Sequence[Mapping[str, Any]], path: Path) -> Device:
    """Writes the file that `--device` takes.

    Raises:
        ConfigError: the records lack the device, its copy or its steps.
    """
    facts = {record["figure"]: record["text"] for record in records if record["part"] == "machine"}
    copies = [record["value"] for record in records if record["figure"] == "copy, read and written"]
    peak = re.match(r"[\d.]+", facts.get("peak", ""))
    rates: dict[tuple[str, int], float] = {}
    for record in records:
        network, details = record["part"].partition("-")[0], record["details"]
        if record["figure"] == "tokens per second" and network in SHAPES and details["of"].startswith("ours"):
            place = network, details["length"]
            rates[place] = max(rates.get(place, 0.0), record["value"])
    parts = {"machine": facts.get("memory_gib"), "a peak": peak, "ops": copies, "124m, 1.3b or llama1b": rates}
    missing = [name for name, found in parts.items() if not found]
    if missing or peak is None:
        raise ConfigError(f"The results have nothing of the parts that constants need: {', '.join(missing)}. Run them.")
    begin = dataclasses.replace(
        device_of("h100"),
        name=facts["device"],
        memory_bytes=float(facts["memory_gib"]) * 2**30,
        peak=float(peak[0]) * 1e12,
        memory_bandwidth=max(copies) * 1e9,
        source=f"measured {facts.get('date', '')} at commit {facts.get('commit', '')}",
    )
    device = fitted([MeasuredStep(*place, rate) for place, rate in rates.items()], begin)
    write_atomically(path, (json.dumps(dataclasses.asdict(device), indent=1) + "\n").encode())
    return device


def _with(device: Device, logarithms: np.ndarray) -> Device:
    """A device with other constants; shares stay below all of a peak."""
    values = dict(zip(FITTED, np.exp(logarithms).tolist(), strict=True))
    shares = {name: min(value, 1.0) for name, value in values.items() if name.endswith("share")}
    return dataclasses.replace(device, **{**values, **shares})
