"""Trains a network on a text of one's own: text, tokens and training in one line.

    python train_on_text.py my_text.txt
    torchrun --nproc-per-node 4 train_on_text.py my_text.jsonl --tensor-model-parallel-size 2 --train-iters 1000

All flags of `pretrain_gpt.py` may follow. Beside the text a folder appears (my_text-training) with the tokenizer, the
token files, the checkpoints and the metrics. What is there is used again: the same line continues where it stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pretrain_gpt
from megatron import log
from megatron.config.programs.own_text import OwnTextFlags
from megatron.config.programs.program import read_program
from megatron.parallel.rank_start import begin_rank

BYTES_PER_ENTRY = 512  # of text for each entry of a learnt vocabulary: 2 MB give 4,096


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and returns the exit code of `megatron.errors.ExitCode`."""
    begin_rank()
    words = sys.argv[1:] if argv is None else argv
    own, rest = read_program(OwnTextFlags, words, "train_on_text.py", __doc__ or "", unnamed="--text")
    from megatron import device
    from megatron.corpus.training_text import TextRecipe, prepare_text

    device.choose_accelerator()
    preset = own.model_preset or ("workstation" if device.device_type() == "cuda" else "laptop")
    recipe = TextRecipe("--text", "--output-folder", entries=own.vocab_size, bytes_per_entry=BYTES_PER_ENTRY)
    prepare_text(own.text, own.tokenizer, own.folder, recipe)
    code = pretrain_gpt.train(["--model-preset", preset, *own.words(), *rest], defaults=own.defaults())
    if code == 0:
        log.info(f"to hear from it: echo 'Once' | python tools/generate_samples_gpt.py --load {own.folder}/checkpoints")
    return code


if __name__ == "__main__":
    log.exit_with(main)
