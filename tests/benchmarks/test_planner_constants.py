"""The planner's constants of a device from the results of `benchmarks/gpu`; here of one that does not exist."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.constants import TOKENS, MeasuredStep, planned_step
from megatron.errors import ConfigError
from trident.plan.hardware import device_of

STEPS = [(network, length) for network in ("124m", "1.3b", "llama1b") for length in (1024, 4096)]
MADE_UP = dataclasses.replace(
    device_of("h100"),
    name="a device that does not exist",
    peak=500e12,
    memory_bandwidth=1500e9,
    product_share=0.6,
    attention_share=0.4,
    traffic_share=0.7,
    host_seconds_per_layer=15e-3,
)


def write_results(path: Path, parts: str = "machine ops steps") -> None:
    """Results as `benchmarks/gpu` writes them, of steps as the made-up device would take them."""
    facts = {"device": MADE_UP.name, "memory_gib": "79.2", "peak": "500 TFLOP/s in bf16", "commit": "abc"}
    records = [{"part": "machine", "figure": name, "text": text, "details": {}} for name, text in facts.items()]
    copied = {"value": 1500.0, "unit": "GB/s", "details": {"of": "torch copy_"}}
    records += [{"part": "ops", "figure": "copy, read and written", **copied}]
    for network, length in STEPS:
        rate = TOKENS / planned_step(MeasuredStep(network, length, 1.0), MADE_UP).time.seconds
        part = network if length == 1024 else f"{network}-{length}"
        for of, value in (("ours, --kernels csrc", rate), ("ours, --kernels torch", 0.8 * rate), ("plain", 2 * rate)):
            details = {"of": of, "length": length}
            records += [{"part": part, "figure": "tokens per second", "value": value, "details": details}]
    kept = [each for each in records if (each["part"] if each["part"] in ("machine", "ops") else "steps") in parts]
    path.write_text("".join(json.dumps(record | {"unit": ""}) + "\n" for record in kept))


def test_results_become_a_file_that_the_planner_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, constants = tmp_path / "results.jsonl", tmp_path / "mine.json"
    write_results(results)
    assert main(["--page", str(results), "--constants", str(constants)]) == 0
    assert "### 1.3b-4096" in capsys.readouterr().out
    device = device_of(str(constants))
    assert (device.name, device.peak, device.memory_bandwidth) == (MADE_UP.name, 500e12, 1500e9)
    assert device.source == "measured  at commit abc"
    assert device.product_share == pytest.approx(0.6, rel=0.1)
    assert device.host_seconds_per_layer == pytest.approx(15e-3, rel=0.3)
    for network, length in STEPS:
        step = MeasuredStep(network, length, 1.0)
        seconds = planned_step(step, MADE_UP).time.seconds
        assert planned_step(step, device).time.seconds == pytest.approx(seconds, rel=0.03)


@pytest.mark.parametrize(
    ("parts", "missing"), [("ops steps", "machine, a peak"), ("machine steps", "ops"), ("machine ops", "124m, 1.3b or")]
)
def test_results_without_the_parts_that_it_takes_are_refused(tmp_path: Path, parts: str, missing: str) -> None:
    results = tmp_path / "results.jsonl"
    write_results(results, parts)
    with pytest.raises(ConfigError, match=f"nothing of the parts that constants need: {missing}"):
        main(["--page", str(results), "--constants", str(tmp_path / "mine.json")])
