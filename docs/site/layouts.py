"""Writes docs/layouts.md, the combinations of layouts and features that the rules of the flags refuse.

    python docs/site/layouts.py
    python docs/site/layouts.py --grid

The second prints every pair of a pipeline and another value with the test that trains it, and writes nothing.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.site.layout_survey import AXES, refusals
from megatron import process_exit
from megatron.config import ConfigSection, flag, parse_flags

PAGE = Path(__file__).resolve().parents[2] / "docs" / "layouts.md"
# A small network with many divisors of its layers and heads.
COMMAND = shlex.split(
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --train-iters 10 --data-path corpus_text_document "
    "--vocab-file vocab.json --merge-file merges.txt"
)

# Pairs trained in every run of the tests; the campaign trains the others.
FEW = (
    ("zbv", "a teacher too"),
    ("interleaved-zb", "some frozen"),
    ("zb-h1", "muon"),
    ("v-half", "lion"),
    ("zbv", "fp16"),
    ("interleaved-zb", "masked tokens"),
    ("v-1f1b", "curriculum"),
    ("zbv", "Ulysses 2"),
    ("interleaved-zb", "a ring of 2"),
    ("zb-h1", "tensor 2 with sequence parallelism"),
    ("v-half", "4 experts on 2 ranks"),
)

_TABLE = "tests/parity/pipeline/test_layout_table.py"
_FEW = f"{_TABLE}::test_a_few_pairs_train_like_one_process"
_EACH = f"{_TABLE}::test_a_value_trains_with_every_pipeline[{{}}]"
_SCHEDULES = "tests/parity/pipeline/test_schedules.py::test_a_schedule_equals_one_process"
_PARITY = "tests/parity/test_parity.py::test_fp32_layout_equals_reference"
# The test that trains with a value of `AXES`, compared with one process where the value changes the layout.
TESTED_BY: Mapping[str, str] = {
    "no pipeline": _PARITY,
    **dict.fromkeys(("1f1b", "interleaved", "zb-h1", "interleaved-zb", "zbv", "v-half", "v-1f1b"), _SCHEDULES),
    "1f1b, engine deepspeed": "tests/engine/pipeline/test_deepspeed_pipeline.py::test_both_engines_train_alike",
    **{f"ZeRO {stage}": _PARITY for stage in range(4)},
    "tensor 1": _PARITY,
    "tensor 2": _PARITY,
    "tensor 2 with sequence parallelism": (
        "tests/parity/sequence/test_sequence_parallel.py::test_layout_equals_one_process"
    ),
    "whole sequences": _PARITY,
    **dict.fromkeys(
        ("a ring of 2", "Ulysses 2", "a ring of 2 groups of 2"),
        "tests/parity/sequence/test_context_parallel.py::test_losses_and_norms_are_those_of_one_process",
    ),
    "nothing recomputed": _PARITY,
    "attention recomputed": "tests/parity/test_switches.py::test_layout_equals_one_process",
    "blocks recomputed": "tests/parity/test_switches.py::test_layout_equals_one_process",
    "float32": _PARITY,
    "bf16": "tests/parity/test_parity.py::test_bf16_layout_stays_near_reference",
    "bf16 with fp8 products": "tests/parity/precision/test_float8.py::test_layouts_are_alike",
    "fp16": _FEW,
    "next tokens": _PARITY,
    "masked tokens": "tests/parity/test_bert.py::test_a_layout_equals_plain_torch",
    "labels alone": _PARITY,
    "a teacher too": (
        "tests/train/callbacks/test_distillation.py::test_every_layout_learns_the_same_and_a_resume_goes_on"
    ),
    "all trained": _PARITY,
    "some frozen": ("tests/engine/test_freezing.py::test_every_layout_trains_the_same_and_leaves_frozen_weights"),
    "full samples": _PARITY,
    "curriculum": ("tests/train/runs/test_published_runs.py::test_published_commands_and_growing_samples_train"),
    "dense": _PARITY,
    "4 experts": "tests/parity/test_experts.py::test_every_layout_trains_like_one_process",
    **dict.fromkeys(
        ("4 experts on 2 ranks", "4 whole experts on 2 ranks"),
        "tests/parity/experts/test_expert_parallel.py::test_experts_on_other_ranks_train_like_one_process",
    ),
    "not compiled": _PARITY,
    "adam": _PARITY,
    **dict.fromkeys(
        ("muon", "lion", "sgd", "schedule-free"),
        "tests/parity/optimizers/test_optimizers.py::test_every_layout_trains_like_one_process",
    ),
    "compiled": "tests/parity/test_compile.py::test_layouts",
    "on the device": _PARITY,
    "on the host": "tests/engine/optimizer/test_offloading.py::test_offloading_changes_no_step",
}
REPLICAS = "2 replicas"  # twice the processes: no flag
_PAIRED = (*(value for axis, values in AXES.items() if axis != "pipeline" for value in values), REPLICAS)
# The tests of pairs of a pipeline and another value, by their number in the grid.
PAIRS_TESTED_BY = (_PARITY, _SCHEDULES, TESTED_BY["1f1b, engine deepspeed"], _FEW, _EACH.format("VALUE"))

_PAGE = """# Combinations that are refused

The combinations of parallelism, schedule, precision and other features that are refused before a run starts, with the
reason and the nearest setting that works. Everything else can be combined, data parallelism with everything.
`python docs/site/layouts.py` writes this page from the rules.

The table covers what the flags alone determine. On a GPU, `--cpu-optimizer` also requires ZeRO 1 or higher, and
`--compile` cannot be combined with dropout in fused attention.

| combination | reason and way out |
|---|---|
"""
_MORE = """
## What works, and its tests

`doctor.py` lists the possible changes of a given command, each with its test. The second command prints the full grid:
every pipeline with every other value, and the test that compares the pair with one process.

```text
python tools/doctor.py --layouts -- pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16
python docs/site/layouts.py --grid
```
"""


@dataclass(frozen=True)
class LayoutFlags(ConfigSection):
    """Flags of this program."""

    grid: bool = flag(False, "print the full grid with its tests, and leave the page as it is")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page, or prints the grid."""
    flags = parse_flags(LayoutFlags, sys.argv[1:] if argv is None else argv, description=__doc__ or "")
    refused = [(combination.values, combination.sentence) for combination in refusals(COMMAND)]
    if flags.grid:
        print("\n".join(grid([frozenset(values) for values, _ in refused])))
    else:
        PAGE.write_text(page(refused), encoding="utf-8")
        print(PAGE)
    return 0


def page(refused: Sequence[tuple[tuple[str, ...], str]]) -> str:
    """The page, from the refused combinations and their messages."""
    rows = (f"| {cell} | {sentence.replace('|', '&#124;')} |\n" for cell, sentence in _merged(refused))
    return _PAGE + "".join(rows) + _MORE


def grid(refused: Sequence[frozenset[str]]) -> Iterator[str]:
    """The lines of the full grid: `no`, or `yes` with the number of the test below; then the test of each value."""
    pipelines, numbers = list(AXES["pipeline"]), {test: number for number, test in enumerate(PAIRS_TESTED_BY, 1)}
    pairs = pair_tests(refused)
    yield "| | " + " | ".join(pipelines) + " |"
    yield "|---" * (1 + len(pipelines)) + "|"
    for value in _PAIRED:
        tests = [pairs.get((pipeline, value), "").replace(f"[{value}]", "[VALUE]") for pipeline in pipelines]
        cells = [f"yes {numbers[test]}" if test else "no" for test in tests]
        yield f"| {value} | " + " | ".join(cells) + " |"
    yield ""
    yield from (f"{number}. `{test}`" for number, test in enumerate(PAIRS_TESTED_BY, 1))
    yield from ("", "| value | flags | test |", "|---|---|---|")
    for values in AXES.values():
        for value, flags in values.items():
            yield f"| {value} | {f'`{flags}`' if flags else ''} | `{TESTED_BY[value]}` |"


def pair_tests(refused: Sequence[frozenset[str]]) -> dict[tuple[str, str], str]:
    """The test of each pair of a pipeline and another value that is not refused."""
    return {
        (pipeline, value): test_of(pipeline, value) or ""
        for pipeline in AXES["pipeline"]
        for value in _PAIRED
        if not any(combination <= {pipeline, value} for combination in refused)
    }


def test_of(pipeline: str, value: str) -> str | None:
    """The test that trains with both, if they can be combined; None for a pipeline outside the table, such as a
    schedule file.
    """
    test = TESTED_BY.get(pipeline)
    if value == REPLICAS or test is None:
        return test
    (axis,) = (axis for axis, values in AXES.items() if value in values)
    is_first = value == next(iter(AXES[axis]))
    if is_first or (test == _SCHEDULES and (axis in ("ZeRO", "recompute") or value == "tensor 2")):
        return test
    return _FEW if (pipeline, value) in FEW else _EACH.format(value)


def _merged(refused: Sequence[tuple[tuple[str, ...], str]]) -> Iterator[tuple[str, str]]:
    """Merges combinations that differ only in their first value and have the same message."""
    firsts: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (first, *rest), sentence in refused:
        firsts.setdefault((tuple(rest), sentence), []).append(first)
    for (rest, sentence), values in firsts.items():
        yield " + ".join((" or ".join(values), *rest)), sentence


def refused_on(text: str) -> dict[tuple[str, ...], str]:
    """The rows of the page: values and message of each refused combination."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    return {
        (first, *rest): sentence.replace("&#124;", "|")
        for cell, sentence in rows
        for firsts, *rest in [cell.split(" + ")]
        for first in firsts.split(" or ")
    }


if __name__ == "__main__":
    process_exit.exit_with(main)
