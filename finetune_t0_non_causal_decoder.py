"""Fine-tunes on packed pairs of inputs and targets (T0): `pretrain_gpt.py` with `--objective multitask`.

Each prefix of --data-path names two pairs of token files, `PREFIX_inputs_document` and `PREFIX_targets_document`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pretrain_gpt
from megatron import process_exit
from megatron.config import Program


def main(argv: Sequence[str] | None = None) -> int:
    """Trains with the flags of `pretrain_gpt.py`, and returns the exit code of `megatron.errors.ExitCode`."""
    return pretrain_gpt.main(argv, Program(fixed={"loss.objective": "multitask"}))


if __name__ == "__main__":
    process_exit.exit_with(main)
