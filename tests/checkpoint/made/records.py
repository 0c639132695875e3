"""A record as a run writes it, for tests that need one."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.checkpoint.record import Progress, Record
from megatron.data.order.plan import DataPlan
from megatron.tokenizers.record import TokenizerRecord

PLAN = DataPlan(sequence_length=16, seed=1234, epoch_rule="bigscience", train=None, valid=(), test=())


def make_record(step: int = 4, **changes: Any) -> Record:
    """The record of a run that trained a number of steps of 8 samples of 10 tokens."""
    record = Record(
        progress=Progress(step, 8 * step, 80 * step),
        optimizer_updates=step,
        loss_scale={"cur_scale": 8.0},
        config={"saving": {"no_save_optim": False}},
        data_plan=PLAN,
        data={"corpus_text_document": {"tokens": 1}},
        tokenizer=TokenizerRecord("GPT2BPE", "a" * 64, 600),
        program_version="0.1",
    )
    return dataclasses.replace(record, **changes)
