"""GPT2-ALL-IN's trainer: a JSON file with dataset, model and trainer in, a named run folder out.

    python train.py --config cpu.json
    python train.py --resume logs/gentle_lovelace-26112211

Files are looked up as they are given, then in examples/gpt2_all_in/configs. The run is in logs/NAME: ckpt, tb,
config.json. Any flag of pretrain_gpt.py may follow and wins over the file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pretrain_gpt
from megatron import log
from megatron.config.programs.all_in_one import AllInOneFlags, command_line
from megatron.config.programs.program import read_program
from megatron.parallel.rank_start import begin_rank


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and returns the exit code of `megatron.errors.ExitCode`."""
    begin_rank()
    flags, others = read_program(AllInOneFlags, sys.argv[1:] if argv is None else argv, "train.py", __doc__ or "")
    words, wanted = command_line(flags, others), flags.wanted_device()

    from megatron import device

    if wanted not in ("auto", device.device_type()):
        log.warning(
            f'{flags.path}: "trainer.device" is {wanted}, and this run computes on {device.device_type()}: the device '
            "is picked automatically."
        )
    return pretrain_gpt.train(words)


if __name__ == "__main__":
    log.exit_with(main)
