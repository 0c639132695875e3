"""Trains the model of train_bert.py with DeepSpeed, in as many processes as the launcher starts.

    deepspeed --bind_cores_to_rank train_bert_ds.py --checkpoint_dir experiment_deepspeed --dataset text.txt
    deepspeed --num_gpus 2 train_bert_ds.py --checkpoint_dir . --dataset text.txt --dtype bf16 --zero-stage 2

All flags of `pretrain_gpt.py` may follow, `--deepspeed_config FILE` among them. docs/tutorial_deepspeed.md explains
every step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.hello_deepspeed.flags import HelloDeepSpeedEngineFlags
from megatron import process_exit
from megatron.config.program_flags import read_program
from megatron.parallel.rank_start import begin_rank


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and returns the exit code of `megatron.errors.ExitCode`."""
    begin_rank()
    from examples.hello_deepspeed import train_bert

    given = sys.argv[1:] if argv is None else argv
    flags, arguments = read_program(HelloDeepSpeedEngineFlags, given, "train_bert_ds.py", __doc__ or "")
    return train_bert.run(flags, arguments)


if __name__ == "__main__":
    process_exit.exit_with(main)
