"""Trains a RoBERTa-style masked language model in one process, with the flags of HelloDeepSpeed's train_bert.py.

    python train_bert.py --checkpoint_dir ./experiments --dataset text.txt
    python train_bert.py --load_checkpoint_dir ./experiments/bert_pretrain.2026.11.22.12.05.59.3f8a1c07

All flags of `pretrain_gpt.py` may follow. docs/tutorial_deepspeed.md explains every step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt
from examples.hello_deepspeed.flags import HelloDeepSpeedFlags, continued
from megatron import process_exit
from megatron.config.program_flags import read_program
from megatron.parallel.rank_start import begin_rank


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and returns the exit code of `megatron.errors.ExitCode`."""
    begin_rank()
    flags, arguments = read_program(
        HelloDeepSpeedFlags, sys.argv[1:] if argv is None else argv, "train_bert.py", __doc__ or ""
    )
    return run(flags, arguments)


def run(flags: HelloDeepSpeedFlags, arguments: Sequence[str]) -> int:
    """Prepares the dataset where that is still to be done, and trains; also for train_bert_ds.py."""
    flags = continued(flags)
    from trident.corpus.training_text import prepare_text

    prepare_text(flags.dataset, flags.tokenizer, flags.prepared)
    return pretrain_gpt.train([*flags.trainer_arguments(), *arguments], flags.program)


if __name__ == "__main__":
    process_exit.exit_with(main)
