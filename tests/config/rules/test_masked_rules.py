"""What cannot be combined with masked language modelling, and the program that gives its objective."""

from __future__ import annotations

import pytest

import pretrain_bert
from megatron.config import parse
from megatron.errors import ConfigError
from tests.config.command_lines import words


def test_the_program_gives_the_objective_and_prefers_the_heads_of_bert() -> None:
    def read(flags: str) -> tuple[object, ...]:
        asked = words(flags, drop="--merge-file")
        request = parse(asked, program=pretrain_bert.PROGRAM)
        model = request.model
        return (request.loss.objective, request.data.tokenizer_type, model.masked_lm_head, model.token_types)

    assert read("") == ("masked", "BertWordPieceLowerCase", True, 2)
    assert read("--bert-no-binary-head") == ("masked", "BertWordPieceLowerCase", True, 0)
    assert read("--num-token-types 1 --tokenizer-type BertWordPieceCase") == ("masked", "BertWordPieceCase", True, 1)
    with pytest.raises(
        ConfigError, match="--objective causal was requested, but this program requires --objective mask"
    ):
        read("--objective causal")
