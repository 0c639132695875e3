"""Pretrains and fine-tunes dsGPT2's networks with its own flags: `pretrain_gpt.py` on documents in a database.

Flags of `pretrain_gpt.py` may be mixed with dsGPT2's, so it runs in every layout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt
from examples.dsgpt2.flags import DsGpt2Flags
from megatron import process_exit
from megatron.config.program_flags import read_program
from megatron.parallel.rank_start import begin_rank


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and returns the exit code of `megatron.errors.ExitCode`."""
    begin_rank()
    arguments = sys.argv[1:] if argv is None else argv
    flags, trainers = read_program(DsGpt2Flags, arguments, "ds_trainer.py", __doc__ or "")
    return pretrain_gpt.train([*flags.trainer_arguments(), *trainers], flags.program)


if __name__ == "__main__":
    process_exit.exit_with(main)
