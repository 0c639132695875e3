r"""jax-lm-training's second step: trains GPT-2 on windows in Parquet files.

    cd examples/jax_lm_training
    python -m jax_lm.train --model-config-name gpt2 --train-dataset-paths "dataset/wikitext.train**" \
        --eval-dataset-paths "dataset/wikitext.test**" --batch-size 16 --num-epochs 5 --model-save-dir artifacts/

All flags of `pretrain_gpt.py` may follow, and `torchrun --nproc-per-node N` trains on N devices. See
docs/seeds/jax_lm_training.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import pretrain_gpt
from examples.jax_lm_training.jax_lm.flags import JaxLmFlags
from megatron import process_exit
from megatron.config.program_flags import read_program
from megatron.parallel.rank_start import begin_rank


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and returns the exit code of `megatron.errors.ExitCode`."""
    begin_rank()
    flags, arguments = read_program(
        JaxLmFlags, sys.argv[1:] if argv is None else argv, "jax_lm/train.py", __doc__ or ""
    )
    return pretrain_gpt.train([*flags.trainer_arguments(), *arguments], flags.program)


if __name__ == "__main__":
    process_exit.exit_with(main)
