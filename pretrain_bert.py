"""Pretrains an encoder by masked language modelling: BERT, or with other samples and heads RoBERTa.

The flags are those of `pretrain_gpt.py`; the objective, the heads and the tokenizer of BERT are given.
"""

from __future__ import annotations

from collections.abc import Sequence

import pretrain_gpt
from megatron import process_exit
from megatron.config import Program

BERT = {
    "model.bidirectional": True,
    "model.masked_lm_head": True,
    "model.sentence_order_head": True,
    "data.tokenizer_type": "BertWordPieceLowerCase",
}
PROGRAM = Program(fixed={"loss.objective": "masked"}, defaults=BERT)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains with the flags of `pretrain_gpt.py`, and returns the exit code of `megatron.errors.ExitCode`."""
    return pretrain_gpt.main(argv, PROGRAM)


if __name__ == "__main__":
    process_exit.exit_with(main)
