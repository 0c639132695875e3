"""Trains a network at every ZeRO stage, with and without offloading, and compares memory per rank and losses.

Each cell of the table is a separate run on the same ranks and batch, from the same initial weights.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron import device
from megatron.config import Machine, TokenizerFacts, parse, resolve
from megatron.config.program_flags import arguments_of
from megatron.data.loader import Batch
from megatron.engine.engine import Engine
from megatron.engine.memory.closed_form import Amounts
from megatron.engine.memory.held import held_bytes, predicted_amounts
from megatron.parallel.joining import close_mesh, count_ranks, open_mesh
from megatron.train.start_up.engine_opening import build_engine

# DeepSpeed preallocates its buckets, by default half a billion elements each.
_BUCKET_ELEMENTS = 500_000
_SAMPLES_PER_RANK = 2
_HEADINGS = ("stage", "offload", "parameters", "gradients", "optimizer", "on the device", "loss")


@dataclass(frozen=True)
class TableRun:
    """The network and training of every cell.

    Attributes:
        num_layers, hidden_size, num_attention_heads, seq_length, vocab_size: the network.
        steps: updates of each cell.
        dtype: fp32, bf16 or fp16.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    vocab_size: int
    steps: int
    dtype: str = "fp32"


@dataclass(frozen=True)
class Cell:
    """A ZeRO stage and its offloading to host memory."""

    stage: int
    offloads_optimizer: bool = False
    offloads_parameters: bool = False

    @property
    def offload(self) -> str:
        """The value of the column `offload`."""
        return ("no", "optimizer", "all")[self.offloads_optimizer + self.offloads_parameters]

    def settings(self) -> dict[str, Any]:
        """The DeepSpeed settings of the cell."""
        zero: dict[str, Any] = {"reduce_bucket_size": _BUCKET_ELEMENTS, "allgather_bucket_size": _BUCKET_ELEMENTS}
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = 0  # divide small parameters as well
            zero["stage3_prefetch_bucket_size"] = _BUCKET_ELEMENTS
        if self.offloads_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.offloads_parameters:
            zero["offload_param"] = {"device": "cpu"}
        return {"zero_optimization": zero}


@dataclass(frozen=True)
class MeasuredCell:
    """A cell of the table on one rank.

    Attributes:
        first_loss, last_loss: loss of the first and the last step, in nats per token.
    """

    cell: Cell
    predicted: Amounts
    measured: Amounts
    first_loss: float
    last_loss: float


def cells_of(dtype: str) -> list[Cell]:
    """The cells of a table; stage 0 has no offloading, and requires fp32."""
    cells = [
        *(Cell(stage, offloads) for stage in (1, 2, 3) for offloads in (False, True)),
        Cell(3, offloads_optimizer=True, offloads_parameters=True),
    ]
    return cells if dtype != "fp32" else [Cell(0), *cells]


def measure_cells(run: TableRun, cells: Sequence[Cell]) -> tuple[int, list[MeasuredCell]]:
    """Trains every cell on the ranks of the launcher; collective over all of them.

    Returns:
        This rank, and its rows of the table.

    Raises:
        ConfigError: the network or the dtype does not fit this machine.
    """
    rows = []
    mesh = None
    for cell in cells:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "deepspeed.json"  # as in any run that offloads
            path.write_text(json.dumps(cell.settings()))
            request = parse([*_arguments(run, cell), "--deepspeed_config", str(path)])
            ranks = count_ranks(request.parallel)
            machine = Machine(device.device_type(), ranks, device.supports_fp16(), device.supports_bf16())
            config = resolve(request, machine, TokenizerFacts(run.vocab_size, 0, "none"))
            mesh = mesh or open_mesh(config.parallel)
            rows.append(_measure(run, cell, build_engine(config, mesh), config.optim.lr or 0.0))
    if mesh is None:
        return 0, rows
    close_mesh(mesh)
    return mesh.world.rank, rows


def largest_difference(rows: Sequence[MeasuredCell]) -> float:
    """The largest difference between the last losses of the cells, in nats per token."""
    return max(row.last_loss for row in rows) - min(row.last_loss for row in rows)


def table_lines(rows: Sequence[MeasuredCell], *, shows_device: bool) -> Iterator[str]:
    """The table as text, with measured amounts, and predicted ones in brackets.

    Args:
        shows_device: True if the device has its own memory, which was measured.
    """
    texts: list[tuple[str, ...]] = [_HEADINGS]
    for row in rows:
        amounts = (
            _pair(getattr(row.measured, name), getattr(row.predicted, name))
            for name in ("parameters", "gradients", "optimizer")
        )
        device_amount = _pair(row.measured.on_device if shows_device else None, row.predicted.on_device)
        texts.append((str(row.cell.stage), row.cell.offload, *amounts, device_amount, f"{row.last_loss:.6f}"))
    widths = [max(len(line[column]) for line in texts) for column in range(len(_HEADINGS))]
    for line in texts:
        yield "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)).rstrip()


def _pair(measured: int | None, predicted: int) -> str:
    return f"({predicted:,})" if measured is None else f"{measured:,} ({predicted:,})"


def _measure(run: TableRun, cell: Cell, engine: Engine, learning_rate: float) -> MeasuredCell:
    measured: list[Amounts] = []

    def note(phase: str) -> None:
        if phase == "step":
            measured.append(held_bytes(engine))

    engine.on_phase = note
    batch = _batch(run, engine.mesh.batch.rank)
    steps = (engine.train_batch([batch], learning_rate) for _ in range(run.steps))
    losses = [step.loss for step in steps if step.loss is not None]
    offloads = cell.offloads_optimizer, cell.offloads_parameters
    predicted = predicted_amounts(engine, offloads_optimizer=offloads[0], offloads_parameters=offloads[1])
    return MeasuredCell(cell, predicted, measured[-1], losses[0], losses[-1])


def _arguments(run: TableRun, cell: Cell) -> list[str]:
    sizes = {
        "--num-layers": run.num_layers,
        "--hidden-size": run.hidden_size,
        "--num-attention-heads": run.num_attention_heads,
        "--seq-length": run.seq_length,
        "--max-position-embeddings": run.seq_length,
        "--micro-batch-size": _SAMPLES_PER_RANK,
        "--train-iters": run.steps,
        "--zero-stage": cell.stage,
    }
    precision = [] if run.dtype == "fp32" else [f"--{run.dtype}"]
    files = ["--data-path", "none", "--vocab-file", "none", "--merge-file", "none"]  # nothing is read
    fixed = ["--lr", "1e-3", "--lr-decay-style", "constant", "--hidden-dropout", "0", "--attention-dropout", "0"]
    return [*arguments_of(sizes), *precision, *files, *fixed]


def _batch(run: TableRun, rank: int) -> Batch:
    """The samples of a rank, the same at every step."""
    drawn = np.random.default_rng(rank).integers(run.vocab_size, size=(_SAMPLES_PER_RANK, run.seq_length + 1))
    ids = np.arange(_SAMPLES_PER_RANK, dtype=np.int64) + rank * _SAMPLES_PER_RANK
    tokens, labels = (np.ascontiguousarray(part, dtype=np.int64) for part in (drawn[:, :-1], drawn[:, 1:]))
    return Batch(tokens, labels, np.ones(tokens.shape, dtype=np.float32), ids, None)
