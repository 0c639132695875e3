"""Defects planted into the sources of csrc/ops, one line of text each, which the emulator tests must find.

    python -m tests.kernels.simt.planted.changes --cases 1000

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

from tests.kernels.simt.harness import builds

TESTS = Path(__file__).resolve().parents[1]
VALUES = "Tensor-likes are not|assert"  # no diagnosis, but a test that compares values fails


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


CHANGES = (
    PlantedChange("dropout_add", "(column >= columns) continue", "(column > columns) continue", "out of bounds: "),
    PlantedChange("dropout_add", "(columns + 1) / 2, all", "columns / 2, all", "unwritten: |division by"),
    PlantedChange("dropout_add", "at = row * columns + column", "at = row * pairs + column", "race: |unwritten: "),
    PlantedChange("dropout_add", "i < all; i += step) {", "i <= all; i += step) {", "out of bounds: "),
    PlantedChange("dropout_add", "bits >> (16 * part)", "bits >> (16 * (1 - part))", VALUES),
    PlantedChange("dropout_add", "static_cast<uint32_t>(rows[row])", "static_cast<uint32_t>(rows[0])", VALUES),
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
    chosen = CHANGES[: parser.parse_args().cases]
    missed = undetected(chosen)
    print("\n".join(missed))
    print(f"{len(chosen) - len(missed)} of {len(chosen)} planted defects were found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
