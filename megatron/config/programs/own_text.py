"""The command line of `train_on_text.py`: a text, and whatever of the trainer's flags is wanted beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.flags.fields import flag
from megatron.config.programs.program import ProgramFlags, words_of

VOCAB_SIZE = 8192


@dataclass(frozen=True)
class OwnTextFlags(ProgramFlags):
    """Flags of `train_on_text.py`."""

    text: str = flag(
        help="a text file, jsonl or Parquet with a column text, or a folder or quoted pattern of these; its name may "
        "stand first on the line, without --text"
    )
    output_folder: str | None = flag(
        None, "folder of token files, tokenizer, checkpoints and metrics; if unset NAME-training beside the text"
    )
    tokenizer: str | None = flag(
        None,
        "tokenizer.json, or a folder that holds one; if unset, a byte-level BPE is learnt from the text",
        spelled=("--tokenizer-name-or-path",),
    )
    vocab_size: int = flag(
        VOCAB_SIZE, "the most entries of a tokenizer that is learnt; a short text gets fewer", at_least=512
    )
    model_preset: str | None = flag(
        None, "the network, see docs/models.md; if unset `laptop` on a CPU and `workstation` on a GPU"
    )

    def problems(self) -> Iterator[str]:
        """Rules between the flags."""
        if self.output_folder is None and ("://" in self.text or any(mark in self.text for mark in "*?[")):
            yield (
                f"--text {self.text} is not one file or folder, so there is no place beside it. Name one: "
                "--output-folder my-training"
            )
        if self.tokenizer is not None and self.vocab_size != VOCAB_SIZE:
            yield (
                f"--vocab-size {self.vocab_size} has no effect with --tokenizer {self.tokenizer}, which has a "
                "vocabulary. Give one of them."
            )

    @property
    def folder(self) -> Path:
        """Where everything is written."""
        if self.output_folder is not None:
            return Path(self.output_folder)
        text = Path(os.path.normpath(self.text))
        return text.with_name(f"{text.name.partition('.')[0] or text.name}-training")

    def words(self) -> list[str]:
        """The trainer's command line that these flags stand for, without the network."""
        return words_of(
            {
                "--data-path": self.folder / "train_text_document",
                "--tokenizer-type": "HFTokenizer",
                "--tokenizer-name-or-path": self.tokenizer or self.folder / "tokenizer.json",
            }
        )

    def defaults(self) -> dict[str, Any]:
        """What the program prefers to the trainer's defaults: the same line goes on where it stopped."""
        checkpoints = str(self.folder / "checkpoints")
        return {
            "control.save": checkpoints,
            "control.load": checkpoints,
            "control.run_dir": str(self.folder / "run"),
            "data.split": "95,5,0",
        }
