"""Prints the memory per rank of each ZeRO stage, with and without offloading, and checks that losses agree.

    torchrun --nproc_per_node 2 tools/runs/zero_table.py
    deepspeed --num_gpus 2 tools/runs/zero_table.py --dtype bf16

A network of the given size is trained for some steps on random tokens, once for each cell of the table. Amounts are
bytes on rank 0 at the start of the update: measured, and in brackets predicted by
megatron/engine/memory/closed_form.py. Without an accelerator, device memory is only predicted. The exit code is 77 if
the losses differ.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import process_exit
from megatron.config import ConfigSection, flag, parse_flags
from megatron.errors import NumericsError
from megatron.parallel.rank_start import begin_rank

_LIMITS = {"fp32": 1.0e-4, "bf16": 1.0e-2, "fp16": 1.0e-2}  # nats


@dataclass(frozen=True)
class ZeroTableFlags(ConfigSection):
    """Flags of this tool."""

    num_layers: int = flag(2, "number of transformer layers", at_least=1)
    hidden_size: int = flag(64, "transformer hidden size", at_least=1)
    num_attention_heads: int = flag(4, "number of attention heads", at_least=1)
    seq_length: int = flag(32, "sequence length", at_least=1)
    vocab_size: int = flag(512, "vocabulary size", at_least=1)
    steps: int = flag(5, "training steps per cell", at_least=2)
    dtype: str = flag("fp32", "training dtype", choices=tuple(_LIMITS))
    json: bool = flag(False, "print one JSON object per cell instead of the table")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all cells on the ranks of the launcher, and prints the table on rank 0."""
    begin_rank()
    arguments = sys.argv[1:] if argv is None else argv
    flags = parse_flags(ZeroTableFlags, arguments, prog="zero_table.py", description=__doc__ or "")
    from megatron import device

    device.choose_accelerator()
    from tools.runs.zero_stages import TableRun, cells_of, largest_difference, measure_cells, table_lines

    sizes = {field.name: getattr(flags, field.name) for field in dataclasses.fields(TableRun)}
    rank, rows = measure_cells(TableRun(**sizes), cells_of(flags.dtype))
    if rank == 0:
        for row in rows if flags.json else ():
            print(json.dumps(dataclasses.asdict(row)))
        for line in () if flags.json else table_lines(rows, shows_device=device.device_type() != "cpu"):
            print(line)
    difference = largest_difference(rows)
    if difference > _LIMITS[flags.dtype]:
        raise NumericsError(
            f"after {flags.steps} steps in {flags.dtype} the losses of the cells differ by {difference:.2e}, more than "
            f"{_LIMITS[flags.dtype]:.0e}. The column of losses shows which cell is wrong."
        )
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
