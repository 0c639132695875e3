"""Time of a layer whose experts are split over ranks, compared with replicated experts, one process and transformers.

    torchrun --nproc-per-node 2 benchmarks/experts_over_ranks.py

Prints one JSON line per measurement: forward and backward of the layer, the slowest rank's time per token of all ranks.
The forms take turns in the same processes on as many cores: `divided`, the same with a capacity of 1, and `copies` have
a thread on every rank and the tokens of each; `alone` and transformers' `grouped_mm` have all threads and all tokens on
the first rank, while the others wait. With `--shared` our layers have a shared expert, and `waiting` is `divided` that
waits for rows before it computes that expert, not after; transformers' layer has none and is left out. `sent` is what
a rank sends to others in both passes, as it was counted; the formula is for an even load, which is what a capacity of 1
makes of any.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.experts import ExpertsFlags, build_layers
from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.config import ConfigSection, ParallelRequest, flag, parse_flags
from megatron.parallel.expert import exchange
from megatron.parallel.expert.exchange import RowExchange
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max

DIVIDED, CAPACITY, WAITING, COPIES, ALONE, GROUPED = "divided", "capacity", "waiting", "copies", "alone", "grouped_mm"
Run = Callable[[], None]


@dataclass(frozen=True)
class OverRanksFlags(ConfigSection):
    """Flags of this program."""

    hidden_size: int = flag(256, "width of the model", at_least=8)
    ffn_hidden_size: int = flag(896, "inner width of an expert", at_least=8)
    num_experts: int = flag(8, "experts", at_least=2)
    topk: int = flag(2, "experts per token", at_least=1)
    tokens: int = flag(1024, "tokens of each rank", at_least=1)
    shared: int = flag(0, "inner width of a shared expert; 0 for none", at_least=0)
    rounds: int = flag(15, "rounds of each", at_least=2)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures on all ranks."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = parse_flags(OverRanksFlags, words, prog="experts_over_ranks.py", description=__doc__ or "")
    os.environ["DS_ACCELERATOR"] = "cpu"
    size = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = open_mesh(ParallelRequest())
    runs = _runs(flags, mesh, open_mesh(ParallelRequest(expert_model_parallel_size=size)))
    seconds: dict[str, list[float]] = {form: [] for form in runs}
    for turn in range(flags.rounds + 1):
        for form in runs if turn % 2 else reversed(runs):
            all_reduce_max(torch.zeros(1), mesh.world)  # they begin together
            started_at = time.perf_counter()
            runs[form]()
            elapsed = torch.tensor([time.perf_counter() - started_at], dtype=torch.float64)
            if all_reduce_max(elapsed, mesh.world) and turn:
                seconds[form].append(float(elapsed) / (size * flags.tokens) * 1e6)
    settings = {"ranks": size, "experts": flags.num_experts, "topk": flags.topk, "tokens": flags.tokens}
    settings["shared"] = flags.shared
    sent = {form: sent_bytes(runs[form], mesh.world.rank) for form in (DIVIDED, CAPACITY)}
    if mesh.world.rank > 0:
        return 0
    for form, values in seconds.items():
        spread, median = (min(values), max(values)), statistics.median(values)
        print_figure("experts", "time_per_token", median, "us", spread=spread, form=form, **settings)
        ratios = [other / divided for other, divided in zip(values, seconds[DIVIDED], strict=True)]
        spread, median = (min(ratios), max(ratios)), statistics.median(ratios)
        print_figure("experts", "times_divided", median, "ratio", spread=spread, form=form, **settings)
    for form, value in {"formula": even_bytes(flags, size), **sent}.items():
        print_figure("experts", "sent", value, "bytes", form=form, **settings)
    return 0


def even_bytes(flags: OverRanksFlags, ranks: int) -> int:
    """The bytes that a rank sends in a forward and a backward pass under an even load.

    Each row of `hidden_size` values travels there and back, and its gradient too; one in `ranks` stays.
    """
    rows = flags.tokens * flags.topk * (ranks - 1) // ranks
    return 4 * rows * flags.hidden_size * 4  # bytes of a float32


def sent_bytes(run: Run, rank: int) -> int:
    """The bytes that this rank sends to others in one run."""
    total, plain = 0, exchange.dist.all_to_all_single

    def counted(received, sent, received_splits=None, sent_splits=None, **options):  # type: ignore[no-untyped-def]
        nonlocal total
        row = sent.element_size() * sent[0].numel() if len(sent) else 0
        stays = len(sent) // options["group"].size() if sent_splits is None else sent_splits[rank]
        total += (len(sent) - stays) * row
        return plain(received, sent, received_splits, sent_splits, **options)

    exchange.dist.all_to_all_single = counted  # type: ignore[assignment]
    try:
        run()
    finally:
        exchange.dist.all_to_all_single = plain
    return total


def _runs(flags: OverRanksFlags, mesh: ParallelMesh, divided: ParallelMesh) -> dict[str, Run]:
    """Forward and backward of each form; the first rank is alone with some."""
    size, rank = mesh.world.size, mesh.world.rank
    shape = {name: getattr(flags, name) for name in ("hidden_size", "ffn_hidden_size", "num_experts", "topk")}
    own = ExpertsFlags(**shape, tokens=flags.tokens)
    whole = build_layers(replace(own, tokens=size * flags.tokens), shared=flags.shared)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, size * flags.tokens, flags.hidden_size, generator=generator)
    layers = {
        DIVIDED: build_layers(own, divided, shared=flags.shared)["ours"],
        CAPACITY: build_layers(own, divided, capacity_factor=1.0, shared=flags.shared)["ours"],
        COPIES: build_layers(own, mesh, shared=flags.shared)["ours"],
        ALONE: whole["ours"],
    }
    layers |= {WAITING: layers[DIVIDED]} if flags.shared else {GROUPED: whole[GROUPED]}

    def run_of(form: str) -> Run:
        is_alone = form in (ALONE, GROUPED)
        tokens = hidden if is_alone else hidden[:, rank * flags.tokens : (rank + 1) * flags.tokens]

        def run() -> None:
            if is_alone and rank > 0:
                return
            torch.set_num_threads(size if is_alone else 1)
            with mock.patch.object(RowExchange, "begin", _begun_and_awaited) if form == WAITING else nullcontext():
                layers[form](tokens.clone().requires_grad_()).square().sum().backward()

        return run

    return {form: run_of(form) for form in layers}


_begin = RowExchange.begin


def _begun_and_awaited(exchange: RowExchange, rows: torch.Tensor, **options: Any) -> torch.Tensor:
    """Leaves nothing to compute while rows travel."""
    arriving = _begin(exchange, rows, **options)
    exchange.finish()
    exchange._tensors = rows, arriving
    return arriving


if __name__ == "__main__":
    process_exit.exit_with(main)
