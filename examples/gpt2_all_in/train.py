"""GPT2-ALL-IN's trainer: from a JSON file with dataset, model and trainer to a named run folder.

    python train.py --config cpu.json
    python train.py --resume logs/gentle_lovelace-26112211

Files are looked up as they are given, then in the folder configs next to this program. The run is in logs/NAME: ckpt,
tb, config.json. Any flag of pretrain_gpt.py may follow and wins over the file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt
from examples.gpt2_all_in.flags import PROGRAM, AllInOneFlags, command_line
from megatron import log, process_exit
from megatron.config.parse import read_flags
from megatron.config.program_flags import read_program
from megatron.parallel.rank_start import begin_rank


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and returns the exit code of `megatron.errors.ExitCode`."""
    begin_rank()
    flags, others = read_program(AllInOneFlags, sys.argv[1:] if argv is None else argv, "train.py", __doc__ or "")
    arguments, requested, text = command_line(flags, others), flags.requested_device(), flags.text()
    if text is not None and text.text_folder is not None:
        from megatron.train.preflight.checks import checked_request
        from trident.corpus.training_text import TextRecipe, prepare_text

        checked_request(read_flags(arguments, program=PROGRAM), has_data=False)
        recipe = TextRecipe('"trainer.dataset"', '"trainer.log_path"')
        with log.show_activity_when_quiet():
            prepare_text(text.trainer.dataset, text.trainer.tokenizer, text.text_folder, recipe)

    from megatron import device

    if requested not in ("auto", device.device_type()):
        log.warning(
            f'{flags.path}: "trainer.device" is {requested}, but this run uses {device.device_type()}: the device '
            "is chosen automatically."
        )
    return pretrain_gpt.train(arguments, PROGRAM)


if __name__ == "__main__":
    process_exit.exit_with(main)
