"""Trains a network on your own text: tokenizer, token files and training in one command.

    python train_on_text.py my_text.txt
    torchrun --nproc-per-node 4 train_on_text.py my_text.jsonl --tensor-model-parallel-size 2 --train-iters 1000

All flags of `pretrain_gpt.py` may follow. Tokenizer, token files, checkpoints and metrics are written to a folder next
to the text (my_text-training). Existing files are reused: the same command continues an interrupted run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pretrain_gpt
from megatron import log, process_exit
from megatron.config import PathUse, Program, flag
from megatron.config.parse import read_flags
from megatron.config.program_flags import ProgramFlags, arguments_of, read_program
from megatron.parallel.rank_start import begin_rank

VOCAB_SIZE = 8192
BYTES_PER_ENTRY = 512  # text for each entry of a trained vocabulary: 2 MB give 4,096


@dataclass(frozen=True)
class OwnTextFlags(ProgramFlags):
    """Flags of this program."""

    text: str = flag(
        help="a text file, jsonl or Parquet with a column text, or a folder or quoted pattern of these; its name may "
        "come first on the line, without --text",
        path=PathUse.FILE_OR_FOLDER,
    )
    output_folder: str | None = flag(
        None,
        "folder of token files, tokenizer, checkpoints and metrics; if unset, NAME-training next to the text",
        path=PathUse.FOLDER,
    )
    tokenizer: str | None = flag(
        None,
        "tokenizer.json, or a folder that holds one; if unset, a byte-level BPE is trained on the text",
        spelled=("--tokenizer-name-or-path",),
        path=PathUse.FILE_OR_FOLDER,
    )
    vocab_size: int = flag(
        VOCAB_SIZE,
        "largest vocabulary of a tokenizer trained on the text; a short text gets a smaller one",
        at_least=512,
    )
    model_preset: str | None = flag(
        None, "the network, see docs/models.md; if unset `laptop` on a CPU and `workstation` on a GPU"
    )

    def problems(self) -> Iterator[str]:
        """Rules between the flags."""
        if self.output_folder is None and ("://" in self.text or any(mark in self.text for mark in "*?[")):
            yield (
                f"--text {self.text} is not one file or folder, so no output folder can be derived from it. Name one: "
                "--output-folder my-training"
            )
        if self.tokenizer is not None and self.vocab_size != VOCAB_SIZE:
            yield (
                f"--vocab-size {self.vocab_size} has no effect with --tokenizer {self.tokenizer}, which has its own "
                "vocabulary. Give one of them."
            )

    @property
    def folder(self) -> Path:
        """The output folder."""
        if self.output_folder is not None:
            return Path(self.output_folder)
        text = Path(os.path.normpath(self.text))
        return text.with_name(f"{text.name.partition('.')[0] or text.name}-training")

    def trainer_arguments(self) -> list[str]:
        """The trainer's command line for these flags, without the network."""
        return arguments_of(
            {
                "--data-path": self.folder / "train_text_document",
                "--tokenizer-type": "HFTokenizer",
                "--tokenizer-name-or-path": self.tokenizer or self.folder / "tokenizer.json",
            }
        )

    @property
    def program(self) -> Program:
        """The program's defaults; with them the same command continues an interrupted run."""
        checkpoints = str(self.folder / "checkpoints")
        defaults = {
            "saving.save": checkpoints,
            "loading.load": checkpoints,
            "report.run_dir": str(self.folder / "run"),
            "report.log_style": "short",
            "data.split": "95,5,0",
        }
        return Program(defaults=defaults)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and returns the exit code of `megatron.errors.ExitCode`."""
    begin_rank()
    arguments = sys.argv[1:] if argv is None else argv
    flags, rest = read_program(OwnTextFlags, arguments, "train_on_text.py", __doc__ or "", positional="--text")
    from megatron.train.preflight.checks import checked_request

    arguments = ["--model-preset", flags.model_preset or _preset_of_this_machine(), *flags.trainer_arguments(), *rest]
    checked_request(read_flags(arguments, program=flags.program), has_data=False)  # before minutes of tokenizing
    with log.show_activity_when_quiet():
        return _prepare_and_train(flags, arguments)


def _prepare_and_train(flags: OwnTextFlags, arguments: Sequence[str]) -> int:
    from trident.corpus.training_text import TextRecipe, prepare_text

    recipe = TextRecipe("--text", "--output-folder", entries=flags.vocab_size, bytes_per_entry=BYTES_PER_ENTRY)
    prepare_text(flags.text, flags.tokenizer, flags.folder, recipe)
    code = pretrain_gpt.train(arguments, flags.program)
    if code == 0:
        load = f"--load {flags.folder}/checkpoints"
        log.info(f"Generate text: echo 'Once' | python tools/generate_samples_gpt.py {load}")
        log.info(f"Chat in a browser: python tools/serve.py {load}")
    return code


def _preset_of_this_machine() -> str:
    """`laptop` on a CPU, `workstation` on a GPU; torch is imported only if there may be one."""
    from megatron.cuda_driver import cuda_unavailable_reason

    if cuda_unavailable_reason():
        return "laptop"
    from megatron import device

    device.choose_accelerator()
    return "workstation" if device.device_type() == "cuda" else "laptop"


if __name__ == "__main__":
    process_exit.exit_with(main)
