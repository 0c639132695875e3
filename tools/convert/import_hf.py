"""Converts a Hugging Face model directory to a checkpoint that any layout can load.

    python tools/convert/import_hf.py Llama-3.2-1B --save checkpoints/llama
    python pretrain_gpt.py --config checkpoints/llama/model.yaml --load checkpoints/llama --finetune --save out ...

Writes the checkpoint, model.yaml with the flags of the network, the tokenizer, and proof.json. The logits of both
networks are compared in float32; if they differ, nothing is written. Use --proof-layers to compare only the first
layers of a model that does not fit into memory twice in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, flag, parse_flags


@dataclass(frozen=True)
class ImportFlags(ConfigSection):
    """Flags of this program."""

    model: str = flag(
        help="directory of a downloaded model; also accepted as a positional argument", path=PathUse.FOLDER
    )
    save: str = flag(help="output folder of the checkpoint; it must not exist", path=PathUse.FOLDER)
    tokenizer_name_or_path: str | None = flag(
        None,
        "path to a tokenizer to use instead of the model's",
        spelled=("--tokenizer-model",),
        path=PathUse.FILE_OR_FOLDER,
    )
    no_tokenizer: bool = flag(False, "import the weights without a tokenizer")
    proof_layers: int | None = flag(
        None,
        "number of first layers, with embedding and output layer, whose logits are compared; all if unset",
        at_least=1,
    )

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        if self.no_tokenizer and self.tokenizer_name_or_path is not None:
            yield (
                f"--no-tokenizer cannot be combined with --tokenizer-name-or-path {self.tokenizer_name_or_path}. Drop "
                "one of them."
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Imports the model and prints how to train it."""
    flags = parse_flags(
        ImportFlags,
        sys.argv[1:] if argv is None else argv,
        prog="import_hf.py",
        description=__doc__ or "",
        positional="--model",
    )

    from trident.convert.hugging_face.importing import ModelImportRequest, import_model
    from trident.convert.hugging_face.model_file import MODEL_FILE

    tokenizer = None if flags.tokenizer_name_or_path is None else Path(flags.tokenizer_name_or_path)
    output = import_model(
        ModelImportRequest(
            Path(flags.model),
            Path(flags.save),
            tokenizer,
            flags.proof_layers,
            has_tokenizer=not flags.no_tokenizer,
        )
    )
    log.line(f"imported {flags.model} to {output}")
    log.line(
        f"train it with --config {output / MODEL_FILE} --load {output} --finetune --save OTHER_FOLDER --save-interval "
        "STEPS"
    )
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
