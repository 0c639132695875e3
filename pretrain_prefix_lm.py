"""Pretrains a prefix language model: `pretrain_gpt.py` with `--objective prefix`.

A random prefix of every sample, or with --reset-attention-mask of every document, is attended to in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence

import pretrain_gpt
from megatron import process_exit
from megatron.config import Program


def main(argv: Sequence[str] | None = None) -> int:
    """Trains with the flags of `pretrain_gpt.py`, and returns the exit code of `megatron.errors.ExitCode`."""
    return pretrain_gpt.main(argv, Program(fixed={"loss.objective": "prefix"}))


if __name__ == "__main__":
    process_exit.exit_with(main)
