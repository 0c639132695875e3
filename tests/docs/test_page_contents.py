"""Pages name every key, flag and field of what they describe."""

import dataclasses
from pathlib import Path

import pytest

import pretrain_bert
from megatron.config import parse
from megatron.config.flags.fields import flags_of
from megatron.config.sampling_flags import BeamFlags
from tests.examples.test_example_scripts import printed
from tests.helpers.commands.guides import ROOT, page
from trident.evaluate.tasks.tasks_file import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_of_evaluation_names_every_key(kind: str) -> None:
    section = page("evaluation.md").partition(f"### `{kind}`")[2].partition("\n##")[0]
    keys = [flag.field for flag in flags_of(KINDS[kind])]
    assert [key for key in keys if key not in ("name", "data", "train") and f"`{key}" not in section] == []


def test_the_page_of_generation_has_every_flag_in_a_table() -> None:
    options = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(BeamFlags)]
    rows = "\n".join(line for line in page("generation.md").splitlines() if line.startswith("|"))
    assert [option for option in options if f"`{option}" not in rows] == []


def test_the_bert_script_starts_what_the_program_reads(tmp_path: Path) -> None:
    words = printed("pretrain_bert.sh", tmp_path)
    request = parse(words[words.index(str(ROOT / "pretrain_bert.py")) + 1 :], program=pretrain_bert.PROGRAM)
    assert (request.model.max_position_embeddings, request.precision.fp16) == (512, True)
    assert request.model.sentence_order_head and not request.notices
