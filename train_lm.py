r"""Trains GPT-2 on windows in Parquet files with the flags of jax-lm-training's `python -m jax_lm.train`.

    python tools/featurize.py --tokenizer-model gpt2 --input corpus.jsonl --output-path dataset/wikitext.train
    python train_lm.py --model-config-name gpt2 --train-dataset-paths "dataset/wikitext.train**" \
        --eval-dataset-paths "dataset/wikitext.test**" --batch-size 16 --num-epochs 5 --model-save-dir artifacts/

All flags of `pretrain_gpt.py` may follow, and `torchrun --nproc-per-node N` trains on N devices. See
docs/seeds/jax_lm_training.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pretrain_gpt
from megatron import log
from megatron.config.programs.jax_lm import JaxLmFlags
from megatron.config.programs.program import read_program
from megatron.parallel.rank_start import begin_rank


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and returns the exit code of `megatron.errors.ExitCode`."""
    begin_rank()
    own, words = read_program(JaxLmFlags, sys.argv[1:] if argv is None else argv, "train_lm.py", __doc__ or "")
    return pretrain_gpt.train([*own.words(), *words], defaults=own.defaults())


if __name__ == "__main__":
    log.exit_with(main)
