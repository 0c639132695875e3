"""Writes docs/layouts.md: which layouts go with what, as the rules of the flags say, with the test of each.

python docs/site/layouts.py
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.site.layout_survey import AXES, refusals
from megatron import process_exit

PAGE = Path(__file__).resolve().parents[2] / "docs" / "layouts.md"
# A small network, whose layers and heads can be divided in many ways.
COMMAND = shlex.split(
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --train-iters 10 --data-path corpus_text_document "
    "--vocab-file vocab.json --merge-file merges.txt"
)

# Pairs that every run of the tests trains; the others are part of its campaign.
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
# The test that trains with a value of `AXES`, and compares with one process where the value divides anything.
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
REPLICAS = "2 replicas"  # what more processes make of any command: no flag asks for it
# The tests of pairs of a pipeline and another value, in the order of their numbers on the page.
PAIRS_TESTED_BY = (_PARITY, _SCHEDULES, TESTED_BY["1f1b, engine deepspeed"], _FEW, _EACH.format("VALUE"))

_BEGIN = """# Which layouts go with what

What can be combined, what is refused, and the tests that train it. The page is written from the rules that refuse a
command before it starts, by `docs/site/layouts.py`.

Data parallelism can be combined with everything here: start more processes. For a command of your own, `doctor.py` says
what could be changed about it:

```text
python tools/doctor.py --layouts -- pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16
```

The tables hold what the flags alone decide. On a GPU, offloading also needs ZeRO 1 or more, and `--compile` cannot be
combined with dropout in fused attention.

## Pipelines

`yes`: the value works with this pipeline, whatever the others are, unless a row of the next table forbids it. The
number is that of a test below, which trains the two together and compares with one process, or one engine with the
other; of the other axes it has the first value.
"""


def main() -> int:
    """Writes the page."""
    PAGE.write_text(page([(one.values, one.sentence) for one in refusals(COMMAND)]), encoding="utf-8")
    print(PAGE)
    return 0


def page(refused: Sequence[tuple[tuple[str, ...], str]]) -> str:
    """The page, from the combinations that are refused and why."""
    sets = [frozenset(values) for values, _ in refused]
    lines = [
        _BEGIN,
        *_matrix(sets),
        "",
        "## Refused",
        "",
        "| combination | why, and the nearest that works |",
        "|---|---|",
    ]
    lines += [f"| {cell} | {sentence.replace('|', '&#124;')} |" for cell, sentence in _merged(refused)]
    lines += [
        "",
        "## Tests",
        "",
        "The tests of the pairs above. Those with the name of a value in brackets run with `--cases 401` or more.",
        "",
        *(f"{number}. `{test}`" for number, test in enumerate(PAIRS_TESTED_BY, 1)),
        "",
        "The tests of each value, most of them in several layouts:",
        "",
    ]
    lines += ["| value | flags | test |", "|---|---|---|"]
    for values in AXES.values():
        for value, flags in values.items():
            lines.append(f"| {value} | {f'`{flags}`' if flags else ''} | `{TESTED_BY[value]}` |")
    return "\n".join(lines) + "\n"


def test_of(pipeline: str, value: str) -> str | None:
    """The test that trains with both, if they go together; None for a pipeline that is not in the table, such as one
    of a schedule file.
    """
    own = TESTED_BY.get(pipeline)
    if value == REPLICAS or own is None:
        return own
    (axis,) = (axis for axis, values in AXES.items() if value in values)
    is_first = value == next(iter(AXES[axis]))
    if is_first or (own == _SCHEDULES and (axis in ("ZeRO", "recompute") or value == "tensor 2")):
        return own
    return _FEW if (pipeline, value) in FEW else _EACH.format(value)


def _matrix(refused: Sequence[frozenset[str]]) -> Iterator[str]:
    pipelines, numbers = list(AXES["pipeline"]), {test: number for number, test in enumerate(PAIRS_TESTED_BY, 1)}
    yield "| | " + " | ".join(pipelines) + " |"
    yield "|---" * (1 + len(pipelines)) + "|"
    for axis, values in {**AXES, "data parallelism": (REPLICAS,)}.items():
        for value in values if axis != "pipeline" else ():
            tests = [(test_of(pipeline, value) or "").replace(f"[{value}]", "[VALUE]") for pipeline in pipelines]
            cells = [
                "no" if any(one <= {pipeline, value} for one in refused) else f"yes {numbers[test]}"
                for pipeline, test in zip(pipelines, tests, strict=True)
            ]
            yield f"| {value} | " + " | ".join(cells) + " |"


def _merged(refused: Sequence[tuple[tuple[str, ...], str]]) -> Iterator[tuple[str, str]]:
    """Combinations that differ in their first value and have the same sentence as one."""
    firsts: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (first, *rest), sentence in refused:
        firsts.setdefault((tuple(rest), sentence), []).append(first)
    for (rest, sentence), values in firsts.items():
        yield " + ".join((" or ".join(values), *rest)), sentence


def refused_on(text: str) -> dict[tuple[str, ...], str]:
    """The rows of the page's table of refused combinations: values, and the sentence."""
    table = text.partition("## Refused\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")][2:]
    return {
        (first, *rest): sentence.replace("&#124;", "|")
        for cell, sentence in rows
        for firsts, *rest in [cell.split(" + ")]
        for first in firsts.split(" or ")
    }


def yes_cells(text: str) -> dict[tuple[str, str], str]:
    """The cells of the page's first table that do not say no: pipeline and value, and the test that the cell names."""
    table = text.partition("## Pipelines\n")[2].partition("\n## ")[0]
    header, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return {
        (pipeline, value): PAIRS_TESTED_BY[int(cell.removeprefix("yes ")) - 1].replace("[VALUE]", f"[{value}]")
        for value, *cells in rows
        for pipeline, cell in zip(header, cells, strict=True)
        if cell != "no"
    }


if __name__ == "__main__":
    process_exit.exit_with(main)
