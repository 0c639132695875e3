"""Defects planted into the sources of csrc/ops, one line of text each, which the emulator tests must find.

    python -m csrc.emulator.planted.changes --cases 1000

runs them all and prints what was found; the suite runs a sample (`test_changes.py`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from csrc.emulator.harness import builds

TESTS = Path(__file__).resolve().parents[3] / "tests" / "kernels" / "emulator"
VALUES = "Tensor-likes are not|assert"  # no diagnosis, but a test that compares values fails
RACE = "race: |uninitialised: "  # a missing barrier is both, depending on who comes first
ROW_ENDS = "misaligned: |out of bounds: "  # packets of rows that are not made of whole ones
ANY = "race: |out of bounds: |misaligned: |unwritten: |Tensor-likes are not"


@dataclass(frozen=True)
class PlantedChange:
    """A text of a source under `csrc/ops` that is replaced, and what the tests of `operation` then report."""

    operation: str
    text: str
    replacement: str
    expected: str
    file: str = ""  # NAME/NAME.cu of the operation unless given

    @property
    def source(self) -> str:
        return self.file or f"{self.operation}/{self.operation}.cu"


DEVICE, TILES = "base/device.h", "base/tiles.h"
CHANGES = (
    PlantedChange(
        "dropout_add", "row < call.row_count; row += step", "row <= call.row_count; row += step", "out of bounds"
    ),
    PlantedChange("dropout_add", "add(sums, values);", "", VALUES),
    PlantedChange("dropout_add", "(bits >> 16, call.threshold", "(bits, call.threshold", VALUES),
    PlantedChange("dropout_add", "own.in_tile(2 * pair)", "own.in_tile(0)", VALUES),
    PlantedChange("dropout_add", "row < end && !own.is", "row <= end && !own.is", "race: |out of bounds: "),
    PlantedChange("dropout_add", " && is_aligned(y) && is_aligned(x) && is_aligned(residual)", "", "misaligned: "),
    PlantedChange("dropout_add", " && is_aligned(dx) && is_aligned(dy)", "", "misaligned: "),
    PlantedChange(
        "softmax", "(lane == 0) parts[warp] = value;\n  __sync", "(lane == 0) parts[warp] = value;\n  //", RACE, DEVICE
    ),
    PlantedChange("softmax", "neutral, operation);\n  __syncthreads();", "neutral, operation);", "race: ", DEVICE),
    PlantedChange("softmax", "lane < warps ?", "lane <= warps ?", "uninitialised: read of shared parts|race: ", DEVICE),
    PlantedChange("softmax", "first + i < visible ? values[i]", "first + i <= visible ? values[i]", VALUES),
    PlantedChange(
        "softmax", "(first < keys) own.write(task, first, v", "(true) own.write(task, first, v", "out of bounds: "
    ),
    PlantedChange("softmax", "visible_keys(row % task", "visible_keys(row / task", VALUES),
    PlantedChange("softmax", "(task.scores) && is_aligned(task.result) &&", "(task.scores) &&", "misaligned: "),
    PlantedChange("softmax", "         is_aligned(task.probabilities) && starts", "         starts", "misaligned: "),
    PlantedChange("softmax", "starts_at_multiples(task.mask, task.mask_strides, 1, kSize) &&", "", "misaligned: "),
    PlantedChange("softmax", "(first & 1) ? bits >> 16 : bits", "bits", VALUES),
    PlantedChange("softmax", "pair < pairs; pair += step", "pair <= pairs; pair += step", "out of bounds: write"),
    PlantedChange("activation", "is_aligned(y) && is_aligned(x) && columns", "columns", "misaligned: "),
    PlantedChange(
        "activation", "is_aligned(dx) && is_aligned(dy) && is_aligned(x) && columns", "columns", "misaligned: "
    ),
    PlantedChange(
        "activation", "(y) && is_aligned(x) && columns % Packet<T>::kSize == 0", "(y) && is_aligned(x)", ROW_ENDS
    ),
    PlantedChange(
        "activation", "(dy) && is_aligned(x) && columns % Packet<T>::kSize == 0", "(dy) && is_aligned(x)", ROW_ENDS
    ),
    PlantedChange("activation", "    __syncthreads();\n    for (int column", "    for (int column", RACE, TILES),
    PlantedChange(
        "activation", "  __syncthreads();\n  if (threadIdx.y != 0 ||", "  if (threadIdx.y != 0 ||", RACE, TILES
    ),
    PlantedChange(
        "activation", "column < left; column +=", "column < kWidth; column +=", "race: |out of bounds: ", TILES
    ),
    PlantedChange("activation", "row < end && !own.is", "row <= end && !own.is", "race: |out of bounds: "),
    PlantedChange("activation", "return first >= left;", "return first > left;", "out of bounds: |race: ", TILES),
    PlantedChange("activation", "if (column < left) to[", "to[", "out of bounds: |race: ", TILES),
    PlantedChange("activation", "int thread = 1; thread < kPart", "int thread = 2; thread < kPart", VALUES, TILES),
    PlantedChange(
        "rotary", "first + kSize : pair + task.sizes.pairs", "first + kSize : pair + task.sizes.pairs - 1", ANY
    ),
    PlantedChange(
        "rotary", "if (first + kSize >= channels)", "if (first + kSize > channels)", "race: |out of bounds: "
    ),
    PlantedChange("rotary", "is_aligned(part.from) && is_aligned(part.to) &&", "", "misaligned: "),
    PlantedChange("rotary", "sine[i] * task.direction", "sine[i]", VALUES),
    PlantedChange("rotary", "pair < task.sizes.pairs) {", "pair <= task.sizes.pairs) {", ANY),
    PlantedChange("rotary", "part_of == 0 ? member", "part_of <= 1 ? member", ANY),
    PlantedChange("rotary", "token >= heads.tokens; token", "token > heads.tokens; token", VALUES),
    PlantedChange("rotary", "head_index >= task.parts[own].heads", "head_index > task.parts[own].heads", ANY),
    PlantedChange(
        "norm",
        "if (lane == 0) parts[threadIdx.x / kWarp] = value;\n  __syncthreads();",
        "if (lane == 0) parts[threadIdx.x / kWarp] = value;",
        RACE,
    ),
    PlantedChange("norm", "meeting.turn = 1 - meeting.turn;", "", "race: "),
    PlantedChange("norm", "lane < warps ? parts[lane]", "lane <= warps ? parts[lane]", RACE),
    PlantedChange("norm", "y][threadIdx.x] = value;\n  __syncthreads();", "y][threadIdx.x] = value;", RACE),
    PlantedChange(
        "norm", "sum += shared[y][threadIdx.x];\n  __syncthreads();", "sum += shared[y][threadIdx.x];", "race: "
    ),
    PlantedChange("norm", "block < row_blocks && j < columns;", "block < row_blocks;", "out of bounds: |race: "),
    PlantedChange(
        "norm",
        "row < end && j < of.columns; row += kColumnRows) {\n    const",
        "row <= end && j < of.columns; row += kColumnRows) {\n    const",
        "out of bounds: ",
    ),
    PlantedChange(
        "norm",
        "layout.block.y * of.columns * sizeof(float) :",
        "of.columns * sizeof(float) :",
        "out of bounds: .*dynamic",
    ),
    PlantedChange("norm", "is_aligned(of.y) && is_aligned(of.total) &&", "is_aligned(of.total) &&", "misaligned: "),
    PlantedChange(
        "norm", "is_aligned(of.weight.data) && is_aligned(of.bias.data)", "is_aligned(of.weight.data)", "misaligned: "
    ),
    PlantedChange(
        "norm", "is_aligned(of.weight.data) && is_aligned(of.partials)", "is_aligned(of.weight.data)", "misaligned: "
    ),
    PlantedChange("norm", "data) && is_aligned(of.branch_bias.data)", "data)", "misaligned: "),
    PlantedChange("norm", "of_branch_bias[k][i] += dx[i]", "of_branch_bias[k][i] = dx[i]", VALUES),
    PlantedChange("norm", "(of.has_bias ? 2 : 1) * row_blocks", "row_blocks", ANY),
    PlantedChange("norm", "is_in(left(k), i) ? from[", "true ? from[", "out of bounds: "),
    PlantedChange("norm", "if (is_in(left(k), i)) to[", "to[", "out of bounds: "),
    PlantedChange("norm", "      to[j] = sum;\n    }\n    __syncthreads();", "      to[j] = sum;\n    }", "race: "),
    PlantedChange(
        "norm", "int y = 1; y < static_cast<int>(blockDim.y)", "int y = 1; y < static_cast<int>(blockDim.y) - 1", VALUES
    ),
    PlantedChange(
        "cross_entropy", "load_packet(row + head + i * kSize)", "load_packet(row + i * kSize)", "misaligned: "
    ),
    PlantedChange(
        "cross_entropy", "share_alignment(to, from) ? elements_to_al", "true ? elements_to_al", "misaligned: "
    ),
    PlantedChange("cross_entropy", "label >= 0 && label < valid ?", "label >= 0 ?", "out of bounds: |Tensor-likes"),
    PlantedChange("cross_entropy", "label < 0 || label >= valid ?", "label < 0 ?", "out of bounds: |Tensor-likes"),
    PlantedChange("cross_entropy", "left == 2 * i + 1 ?", "left == 2 * i ?", VALUES),
    PlantedChange("cross_entropy", "if (first >= columns) continue;", "", "out of bounds: |race: "),
    PlantedChange("cross_entropy", "0u : threadIdx.x / kRowThreads", "0u : 0u", "race: "),
    PlantedChange("cross_entropy", "own.total * megatron::exp_of(own.largest - largest)", "own.total", VALUES),
)


@dataclass
class Outcome:
    """What a run of tests said; pytest calls the hook."""

    operations: Path
    failures: list[str] = field(default_factory=list)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures.append(report.longreprtext)

    @pytest.fixture(autouse=True)
    def changed_sources(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lets the emulator take its sources from the changed copy."""
        monkeypatch.setattr(builds, "OPERATIONS", self.operations)


def failures_with(change: PlantedChange) -> list[str]:
    """Runs the emulator tests of the operation on the changed source, up to the first failure, in this process."""
    outcome = Outcome(builds.changed_operations(change.source, change.text, change.replacement))
    test_file = str(TESTS / f"test_{change.operation}.py")
    options = ["-x", "-q", "-k", "not every_line", "--no-header", "--no-summary", "--tb=short"]
    plugins = ["-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:xdist"]
    pytest.main([test_file, *options, *plugins], plugins=[outcome])
    return outcome.failures


def undetected(changes: Iterable[PlantedChange]) -> list[str]:
    """The changes that no test noticed, or not as expected, with what was said instead."""
    missed = []
    for change in changes:
        failures = failures_with(change)
        if not any(re.search(change.expected, failure) for failure in failures):
            said = "\n".join(failures) or "no test fails"
            missed.append(f"{change.source}: {change.replacement.strip()!r}: expected {change.expected!r}, but {said}")
    return missed


def main() -> int:
    """Runs as many changes as are asked for."""
    parser = argparse.ArgumentParser(description="Defects in csrc/ops that the emulator tests must find.")
    parser.add_argument("--cases", type=int, default=len(CHANGES))
    parser.add_argument("--operation", help="only its sources")
    asked = parser.parse_args()
    chosen = [change for change in CHANGES if asked.operation in (None, change.operation)][: asked.cases]
    missed = undetected(chosen)
    print("\n".join(missed))
    print(f"{len(chosen) - len(missed)} of {len(chosen)} planted defects were found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
