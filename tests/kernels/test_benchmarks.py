"""The benchmark of the compiled operations measures each of them, forward and backward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import kernels_cpu
from benchmarks.gpu.bandwidth import measure_operations
from benchmarks.gpu.context import TINY, Context
from benchmarks.gpu.head import measure_head
from benchmarks.gpu.records import RESULTS, read_records
from benchmarks.operations import CASES
from megatron.errors import ConfigError
from megatron.kernels.native.library import Library

SHORT = ("--rounds", "1", "--milliseconds", "1", "--sizes", "6x64", "--threads", "1")


def test_every_operation_is_measured_and_so_is_torch(compiled: Library, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels_cpu.main([*SHORT, "--library", str(compiled.folder)]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cases = [record for record in records if record["figure"] == "ratio_to_torch"]
    assert {record["operation"] for record in cases} == set(CASES) & set(compiled.operations)
    assert {(record["dtype"], record["passes"]) for record in cases} >= {("float32", "both"), ("bfloat16", "forward")}
    assert records[-1]["figure"] == "geometric_mean" and records[-1]["cases"] == len(cases)
    words = [*SHORT, "--library", str(compiled.folder), "--operations", "dropout_add", "--table"]
    assert kernels_cpu.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("| dropout_add | ")]) == 4  # two variants in two dtypes
    assert lines[-5].startswith("All: geometric mean") and lines[-2].startswith('"dropout_add": ')
    with pytest.raises(ConfigError, match="No compiled levitation to measure"):
        kernels_cpu.main([*SHORT, "--library", str(compiled.folder), "--operations", "levitation"])


@pytest.mark.full
def test_the_parts_of_the_gpu_page_that_need_them(
    compiled: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_KERNELS", str(compiled.folder))
    measure_operations(Context("ops", tmp_path, torch.device("cpu"), TINY))
    measure_head(Context("head", tmp_path, torch.device("cpu"), TINY))
    records = read_records([tmp_path / RESULTS])
    assert not [record for record in records if record["figure"] == "failed"]
    measured = {record["details"]["of"] for record in records if record["figure"] == "forward"}
    assert measured == set(CASES) & set(compiled.operations)
    shares = [record for record in records if record["figure"] == "backward, share of the copy's bandwidth"]
    assert shares and {record["target"] for record in shares} == {"≥ 0.85"}
    head = {record["figure"]: record for record in records if record["part"] == "head"}
    assert head["implementation of the cross-entropy"]["text"] == "csrc"
    assert head["time in times of the other"]["target"] == "≤ 1.05"
