r"""Converts a checkpoint of Megatron-LM, a fork of it, or DeepSpeed to one that any layout can load.

    python tools/convert/import_megatron.py global_step100 --save checkpoints/imported \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

The format is detected: DeepSpeed's pipeline and rank files, its universal checkpoints, Megatron-LM's torch and
torch_dist layouts. With Adam's moments the run can be resumed; otherwise start a new run from the weights:

    python pretrain_gpt.py --config checkpoints/imported/model.yaml --load checkpoints/imported --data-path ...
    python pretrain_gpt.py --config checkpoints/imported/model.yaml --load checkpoints/imported --finetune ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log, process_exit
from megatron.config import PathUse, flag, parse_flags
from megatron.config.sections.data import TokenizerFileFlags, required_tokenizer_type


@dataclass(frozen=True)
class ImportFlags(TokenizerFileFlags):
    """Flags of this program."""

    checkpoint: str = flag(
        help="folder of one or several checkpoints; also accepted as a positional argument", path=PathUse.FILE_OR_FOLDER
    )
    save: str = flag(help="output folder of the checkpoint; it must not exist", path=PathUse.FOLDER)
    tokenizer_type: str = required_tokenizer_type()
    weights_only: bool = flag(False, "do not import the optimizer state and start at iteration 0")
    average_replicated: bool = flag(
        False, "average norms and biases that differ between tensor-parallel ranks instead of refusing them"
    )
    rotary_is_sound: bool = flag(
        False, "assert that a RoPE checkpoint of deepspeedai's fork predates its RoPE bug of December 2024"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Imports the checkpoint and prints how to train it."""
    flags = parse_flags(
        ImportFlags,
        sys.argv[1:] if argv is None else argv,
        prog="import_megatron.py",
        description=__doc__ or "",
        positional="--checkpoint",
    )

    from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
    from trident.convert.foreign import MegatronImportRequest, import_checkpoint, open_foreign
    from trident.convert.megatron_format.torch_files import ImportOptions

    choice = TokenizerChoice(flags.tokenizer_type, flags.vocab_file, flags.merge_file, flags.tokenizer_name_or_path)
    tokenizer = build_tokenizer(choice)
    source = open_foreign(Path(flags.checkpoint), ImportOptions(tokenizer.vocab_size, flags.rotary_is_sound))
    if flags.weights_only:
        source = source.without_moments()
    request = MegatronImportRequest(Path(flags.save), choice, flags.average_replicated)
    output = import_checkpoint(source, request, tokenizer)
    progress = source.state.progress
    log.line(f"imported {source.path} ({source.format}) to {output}")
    if source.has_moments:
        log.line(f"iteration {progress.step}, {progress.consumed_samples} samples; continue it with --load {output}")
    else:
        log.line(f"weights only; train them with --config {output / 'model.yaml'} --load {output} --finetune")
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
