"""What cannot be combined with masked language modelling, and the program that gives its objective."""

from __future__ import annotations

import pytest

import pretrain_bert
from megatron.config import parse
from megatron.errors import ConfigError
from tests.config.command_lines import small, words

MASKED = "--objective masked --bidirectional"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--sentence-order-head --masked-samples stream",
            "cannot be combined with --masked-samples stream: only samples of",
        ),
        ("--reset-position-ids", "--reset-position-ids is for text in which documents follow each other"),
        ("--reset-attention-mask", "--reset-attention-mask is for text in which documents"),
        ("--eod-mask-loss", "--eod-mask-loss is for text in which documents"),
        ("--loss-on-targets-only", "--loss-on-targets-only is for prompts with answers"),
        ("--pack-examples", "--pack-examples is for prompts with answers"),
        ("--eval-tasks tasks.yaml", "--eval-tasks scores continuations of a text"),
        ("--sample-prompts prompts.txt", "--sample-prompts asks for continuations of a text"),
        ("--seq-length 4", "--seq-length 4 with --mask-prob 0.15 leaves no token of a sample"),
    ],
)
def test_flags_of_other_objectives_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(f"{MASKED} {flags}")


def test_the_program_gives_the_objective_and_prefers_the_heads_of_bert() -> None:
    def read(flags: str) -> tuple[object, ...]:
        asked = words(flags, drop="--merge-file")
        request = parse(asked, program=pretrain_bert.PROGRAM)
        model = request.model
        return (request.loss.objective, request.data.tokenizer_type, model.masked_lm_head, model.token_types)

    assert read("") == ("masked", "BertWordPieceLowerCase", True, 2)
    assert read("--bert-no-binary-head") == ("masked", "BertWordPieceLowerCase", True, 0)
    assert read("--num-token-types 1 --tokenizer-type BertWordPieceCase") == ("masked", "BertWordPieceCase", True, 1)
    with pytest.raises(ConfigError, match="--objective causal was requested, but this program is for --objective mask"):
        read("--objective causal")


def test_flags_of_masking_that_change_nothing_are_named() -> None:
    (notice,) = small("--mask-prob 0.2 --short-seq-prob 0.1").notices
    assert notice == "--mask-prob 0.2 has no effect without --objective masked."
    (notice,) = small(f"{MASKED} --masked-samples stream --short-seq-prob 0.5").notices
    assert notice == "--short-seq-prob 0.5 has no effect without --masked-samples sentences."
    assert small(f"{MASKED} --short-seq-prob 0.5").notices == ()
