"""Prints what each ZeRO stage holds per rank, with and without offloading, and checks that all reach the same loss.

    torchrun --nproc_per_node 2 tools/runs/zero_table.py
    deepspeed --num_gpus 2 tools/runs/zero_table.py --dtype bf16

A network of the given size is trained for some steps on random tokens, once for each cell of the table. The amounts are
bytes on rank 0 when the update begins, as measured and, in brackets, as the closed form of
megatron/engine/memory/closed_form.py gives them. On a machine without an accelerator, the memory of the device is that
of the host, and what would be on the device is only predicted. Nothing is compiled. The exit code is 77 if the losses
differ.
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

    num_layers: int = flag(2, "transformer blocks", at_least=1)
    hidden_size: int = flag(64, "width", at_least=1)
    num_attention_heads: int = flag(4, "attention heads", at_least=1)
    seq_length: int = flag(32, "tokens of a sample", at_least=1)
    vocab_size: int = flag(512, "tokens of the vocabulary", at_least=1)
    steps: int = flag(5, "updates of each cell", at_least=2)
    dtype: str = flag("fp32", "dtype of the computation", choices=tuple(_LIMITS))
    json: bool = flag(False, "print one JSON object for each cell instead of the table")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all cells on the ranks of the launcher, and prints the table on rank 0."""
    begin_rank()
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(ZeroTableFlags, words, prog="zero_table.py", description=__doc__ or "")
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
            f"after {flags.steps} steps in {flags.dtype} the losses of the cells are {difference:.2e} apart, and "
            f"{_LIMITS[flags.dtype]:.0e} is the limit. The column of losses shows which cell trains wrongly."
        )
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
