"""Every kind of defect is found, and the same kernels without it raise no alarm."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from csrc.emulator import emulator

SOURCE = Path(__file__).resolve().parents[4] / "csrc/emulator/planted/planted.cu"
THREADS = 64
ENDLESS = 27


@dataclass(frozen=True)
class Defect:
    """A kernel of `planted.cu`, and what each build makes of its broken variant.

    `plain` is part of a diagnosis too, or "values" where only they show it, or None where nothing does.
    """

    number: int
    checked: str | None
    plain: str | None
    elements: int = THREADS
    shift: int = 0
    variant: int = 1
    is_sum: bool = False  # adds to its output


DEFECTS = {
    "missing barrier": Defect(0, "race: read of shared (tile|parts)", "values"),
    "missing barrier before reuse": Defect(1, "race: write to shared (tile|parts)", "values"),
    "one too far": Defect(2, r"out of bounds: read of 4 bytes at in \+ 280 of 280 bytes", "wrote behind", elements=70),
    "misaligned packet": Defect(3, "misaligned: a", "misaligned: a vector of 16 bytes", elements=70, shift=1),
    "return before a barrier": Defect(4, "divergent barrier: .*returned", "divergent barrier: .*returned"),
    "barriers in two branches": Defect(5, r"divergent barrier: .*\.cu:\d+ and at", "divergent barrier"),
    "barrier in one branch": Defect(6, "divergent barrier: ", "divergent barrier: "),
    "plain addition across blocks": Defect(7, r"race: .* \(another block", None, is_sum=True),
    "mask off by one": Defect(8, None, "values"),
    "one partial sum too many": Defect(9, "uninitialised: read of shared parts", "values"),
    "shuffle in a branch": Defect(10, "divergent warp: .*without the lanes fff00000", "divergent warp"),
    "lock step": Defect(11, "race: read of shared (tile|parts)", "values"),
    "shuffle from outside the mask": Defect(12, "inactive lane: .* not in its mask", "inactive lane"),
    "caller outside its mask": Defect(13, "divergent warp: .* not in its mask", "divergent warp"),
    "different warp operations": Defect(14, "divergent warp: .*a vote at .*and in|divergent warp", "divergent warp"),
    "overlapping masks": Defect(15, "divergent warp: .*(different masks|without the lanes)", "divergent warp"),
    "fixed array overflow": Defect(16, r"out of bounds: index 64 of an array of type 'float \[64\]'", None),
    "overflow of an index": Defect(17, "undefined: overflow of a product of type 'int'", None),
    "division by zero": Defect(18, "undefined: division by zero", "undefined: integer division by zero"),
    "shift too wide": Defect(19, "undefined: shift by too much", None),
    "write to an input": Defect(20, "read-only: write to in", None),
    "elements left out": Defect(21, "unwritten: 1 of 64 elements of out were never written, the first at 5", "values"),
    "read of an output": Defect(22, "uninitialised: read of out", "values"),
    "wild pointer": Defect(23, "outside every buffer", "outside every buffer"),
    "too little shared memory": Defect(24, "out of bounds: .*dynamic shared memory", "dynamic shared memory"),
    "atomic beside a read": Defect(25, "race: .* out ", None, is_sum=True),
    "stack overflow": Defect(26, "local variables", "local variables"),
    "endless loop": Defect(ENDLESS, "endless loop: ", "endless loop: "),
    "copy not waited for": Defect(28, "uninitialised: .*|race", "values", elements=THREADS * 12),
    "no barrier behind a copy": Defect(28, "race: |uninitialised", None, elements=THREADS * 12, variant=2),
    "copy into a tile in use": Defect(28, "race: ", None, elements=THREADS * 12, variant=3),
    "too many threads": Defect(29, "launch: a block of 1088 threads", "launch: a block of 1088 threads"),
    "too much shared memory": Defect(30, "launch: 65536 bytes of dynamic", "launch: 65536 bytes of dynamic"),
    "launcher past the end": Defect(31, "out of bounds: cudaMemsetAsync of 260 bytes", "cudaMemsetAsync of 260"),
}


def run_planted(defect: Defect, variant: int, build: str, order: str) -> tuple[list[str], torch.Tensor]:
    """The diagnoses and the output of one kernel."""
    values = torch.arange(defect.elements, dtype=torch.float32) + 1
    shape = (defect.elements if defect.number in (2, 3) else THREADS,)
    limit_seconds = 1 if defect.number == ENDLESS and variant else 60  # a busy machine must not look like a loop
    with emulator.launch(SOURCE, build, order, expects_diagnoses=True, limit_seconds=limit_seconds) as run:
        given = run.input(values, shift=defect.shift)
        out = run.inout(torch.zeros(shape)) if defect.is_sum else run.output(shape)
        run.call("megatron_planted", out, given, defect.elements, defect.number, variant, None)
    return run.diagnoses, out.tensor()


@pytest.mark.parametrize("build", ["checked", "plain"])
def test_every_defect_is_found_and_none_imagined(build: str) -> None:
    """Each order once for the right variants; for the broken ones, one order after the other."""
    wrong = []
    for number, (name, defect) in enumerate(DEFECTS.items()):
        for order in emulator.ORDERS:
            diagnoses, right = run_planted(defect, 0, build, order)
            wrong += [f"{name}, {order}: false alarm: {diagnoses}"] if diagnoses else []
        if name == "endless loop" and build == "checked":
            continue  # a second of processor time, the same in both builds
        diagnoses, values = run_planted(defect, defect.variant, build, list(emulator.ORDERS)[number % 3])
        expected = defect.checked if build == "checked" else defect.plain
        if expected is None or expected == "values":
            has_other_values = not torch.equal(values, right)
            is_seen = not diagnoses and (has_other_values or expected is None)
        else:
            is_seen = any(re.search(expected, diagnosis) for diagnosis in diagnoses)
        wrong += [] if is_seen else [f"{name}: not found, but {diagnoses}"]
    assert wrong == []


def test_a_diagnosis_names_lines_and_threads_and_fails_the_run() -> None:
    """The sentence says where both accesses of a race are; without being expected, it is an error."""
    line = next(n for n, text in enumerate(SOURCE.read_text().splitlines(), 1) if "tile[kThreads - 1" in text)
    told = rf"race: .*shared tile .*at planted\.cu:{line}.*missing_barrier, block 0,0,0, thread \d+,0,0"
    with pytest.raises(AssertionError, match=told), emulator.launch(SOURCE) as run:
        run.call("megatron_planted", run.output((THREADS,)), run.input(torch.ones(THREADS)), THREADS, 0, 1, None)
