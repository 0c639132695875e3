"""Defaults that are others in Megatron-LM: which they are, that the documents name them, and when a run does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megatron.config.flags.legacy import legacy_flags
from megatron.config.parse import field_flags
from megatron.config.rules.megatron_lm import DEFAULTS_THERE, ONLY_THERE
from tests.config.command_lines import small
from tests.config.golden.write_megatron_lm_defaults import DEFAULTS

ROOT = Path(__file__).resolve().parents[3]
THERE = {line.split()[0]: json.loads(line.partition(" ")[2]) for line in DEFAULTS.read_text().splitlines()}
# Other words for the same: none there is what the transformer's own configuration says, or what the machine decides.
SAME = {
    "--num-experts", "--moe-router-topk-scaling-factor", "--yarn-beta-fast", "--yarn-beta-slow",
    "--recompute-num-layers", "--yarn-correction-range-round-to-int", "--no-yarn-correction-range-round-to-int",
    "--add-qkv-bias",
    "--distributed-backend", "--local-rank", "--profile-step-start", "--profile-step-end",
}  # fmt: skip


def differing() -> dict[str, tuple[Any, Any]]:
    """Default there and here of every flag of both."""
    request, pairs = small("--num-experts 4"), {}
    for place, flag in field_flags().items():
        section, _, field = place.partition(".")
        for text in flag.spellings.keys() & THERE.keys() - SAME:
            there, here = THERE[text], getattr(getattr(request, section), field)
            if there is None and (flag.required or flag.facts.computed or not flag.default):
                continue
            if there == "switch":
                there, here = not flag.spellings[text], bool(here)
            if isinstance(there, list):
                there = there[0] if len(there) == 1 else tuple(there)
            if there != here and not flag.required and (there or here):
                pairs[text] = there, flag.default if there is None else here
    return pairs


def test_the_table_has_every_default_that_differs() -> None:
    text = (ROOT / "docs" / "coming_from" / "megatron_lm.md").read_text().partition("## Defaults that differ")[2]
    rows = [line.split("|")[1:4] for line in text.partition("\n## ")[0].splitlines() if line.startswith("| `--")]
    shown = {name: cells for flags, *cells in rows for name in re.findall(r"--[\w-]+", flags)}
    assert shown.keys() & THERE.keys() == differing().keys()
    for name, values in differing().items():
        for value, cell in zip(values, shown[name], strict=True):
            if isinstance(value, (float, str)) and not isinstance(value, bool):
                assert (f"{value:g}" if isinstance(value, float) else value) in cell, name


def test_the_defaults_of_the_notice_are_those_of_the_list() -> None:
    for place, value in DEFAULTS_THERE:
        listed = THERE[field_flags()[place].positive_name]
        assert value == (False if listed == "switch" else listed)


def test_the_signs_of_megatron_lm_are_flags_of_no_fork() -> None:
    forks = (DEFAULTS.parent / "upstream_flags.txt").read_text().split()
    names = {entry.flag.field: entry.flag.positive_name for entry in legacy_flags().values()}
    names |= {place.partition(".")[2]: flag.positive_name for place, flag in field_flags().items()}
    assert forks and not {names[field] for field in ONLY_THERE}.intersection(forks)
