"""Simulates some ranks of each class of a run, compares all ranks and prints the result."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron import log
from megatron.config import RunConfig
from megatron.config.schedule import global_batch_size
from megatron.config.sections.optimizers import AVERAGING
from megatron.data.build import epoch_samples
from megatron.data.sources.source import DataRequest
from megatron.errors import ConfigError, ExitCode
from megatron.observe.quantities import short_bytes, short_count
from megatron.parallel.mesh import requested_axes, requested_experts
from megatron.parallel.rank_tree import children_of
from trident.plan.dry_run.checks import collective_problems, group_problems, peer_problems, split_problems
from trident.plan.dry_run.deadlock import order_problems
from trident.plan.dry_run.programs import Programs, RankProgram
from trident.plan.dry_run.rank_simulation import simulate_rank
from trident.plan.dry_run.shares import Pieces, StepSamples, piece_problems, pieces_of, sample_problems, steps_of
from trident.plan.report import memory_lines
from trident.plan.search import LayoutEstimate

_MOST_SHOWN = 20
_MOST_SAMPLES = 1 << 24


@dataclass(frozen=True)
class DryRun:
    """The programs of all ranks of a run, the checkpoint they write and the samples they read.

    Attributes:
        programs: of a step, by the first step of each batch size.
        others: of an evaluation and of a save, by name.
        pieces: the shards of tensors in a checkpoint.
        steps: the steps whose samples are checked.
        deviating_samples: samples of replicas that do not read their share, by step and replica.
    """

    config: RunConfig
    size: int
    programs: Mapping[int, Programs]
    others: Mapping[str, Programs]
    pieces: Pieces
    steps: Sequence[StepSamples]
    deviating_samples: Mapping[tuple[int, int], np.ndarray]

    def problems(self) -> Iterator[str]:
        """All mismatches, each with its step and rank."""
        steps = {f"step {step}": programs for step, programs in self.programs.items()}
        for name, programs in {**steps, **self.others}.items():
            checks = (group_problems, collective_problems, split_problems, peer_problems)
            mismatches = [sentence for check in checks for sentence in check(programs)]
            yield from (f"{name}, {sentence}" for sentence in mismatches or order_problems(programs))
        saved = self.config.saving.save_interval or self.config.optim.train_iters
        yield from (f"step {saved}, checkpoint: {sentence}" for sentence in piece_problems(self.pieces))
        for given in self.steps:
            yield from sample_problems(given, self._read(given))

    def _read(self, given: StepSamples) -> dict[int, np.ndarray]:
        """The samples of each replica in a step, by its first rank."""
        replicas = self.config.parallel.data_parallel_size
        ranks = self.size // (self.config.parallel.pipeline_model_parallel_size * replicas)
        return {
            replica * ranks: self.deviating_samples[given.step, replica]
            if (given.step, replica) in self.deviating_samples
            else given.of_replica(self.config, replica)
            for replica in range(replicas)
        }


def simulate_run(config: RunConfig, size: int) -> DryRun:
    """Simulates the first, a middle and the last rank of each class of a run that `dry_run_problems` accepts."""
    sizes = {axis.name: axis.size for axis in requested_axes(config.parallel, size)}
    experts = requested_experts(config.parallel)
    tp, inner = sizes["tp"], sizes["cp"] * sizes["sp"]
    stride = tp * math.lcm(inner, experts.size) if experts.keeps_tensor else math.lcm(tp * inner, experts.size)
    replicas = size // (stride * sizes["pp"])
    first = {global_batch_size(config.optim, 0): 0}
    for given in steps_of(config, (config.optim.rampup_batch_size or (0, 0, 0))[2] + 1):
        first.setdefault(given.size, given.step)
    simulated, results = dict[int, list[RankProgram]](), dict[Any, Any]()
    for stage in range(sizes["pp"]):
        for offset in range(stride):
            rank = stage * stride * replicas + offset
            tensor = offset % tp
            if tensor > 1 and experts.keeps_tensor:
                simulated[rank] = [program.at(rank) for program in simulated[rank - tensor + 1]]
            else:
                simulated[rank] = simulate_rank(config, rank, size, list(first), results)
    # A middle and the last replica, whose code may take other branches than the first.
    others = {replicas // 2, replicas - 1} - {0}
    further = [
        simulate_rank(config, rank + stride * replica, size, list(first), results)
        for rank in simulated
        for replica in others
    ]
    *programs, evaluation, save = (
        Programs(size, stride, replicas, {rank: each[index] for rank, each in simulated.items()}).with_deviating(
            *(each[index] for each in further)
        )
        for index in range(len(first) + 2)
    )
    steps = tuple(steps_of(config, min(_MOST_SAMPLES, _epoch(config) or _MOST_SAMPLES)))
    return DryRun(
        config,
        size,
        dict(zip(first.values(), programs, strict=True)),
        {"evaluation": evaluation, "save": save},
        pieces_of(config, simulated, size),
        steps,
        {},
    )


def _epoch(config: RunConfig) -> int | None:
    """Samples of an epoch of the token file; None if it does not exist, or several are blended."""
    paths = config.data.data_path or ()
    if not any(Path(f"{path}.idx").is_file() for path in paths):
        return None
    try:
        return epoch_samples(DataRequest(config.data, config.data.seq_length, config.random.seed))
    except ConfigError:
        return None


def dry_run_lines(dry_run: DryRun, seconds: float) -> Iterator[str]:
    """Formats the simulated run."""
    config, size, programs = dry_run.config, dry_run.size, dry_run.programs[0]
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in requested_axes(config.parallel, size) if axis.size > 1)
    experts = config.parallel.expert_model_parallel_size
    yield (
        f"{size:,} ranks: {axes or 'one'}{f', ep {experts}' if experts > 1 else ''}; "
        f"{len(programs.simulated):,} classes of ranks"
    )
    ranks = sorted(programs.simulated)
    for rank in dict.fromkeys((ranks[0], ranks[len(ranks) // 2], ranks[-1])):
        program = programs.simulated[rank]
        messages = Counter(entry.message.kind for entry in program.events)
        weights = short_bytes(program.parameters)
        sent = ", ".join(f"{number:,} {kind}" for kind, number in sorted(messages.items()))
        yield f"rank {rank}: {weights} of weights; messages per step: {sent or 'none'}"
    kinds = 1 + config.optim.state_bytes(of_blocks=True) // 4  # the weight, and fp32 optimizer state
    kinds += config.optim.optimizer in AVERAGING  # the averaged weights of a checkpoint
    parameters = sum(math.prod(shape) for shape in dry_run.pieces.shapes.values())
    boxes, saved = sum(len(boxes) for boxes in dry_run.pieces.boxes.values()), programs.saved_pieces()
    yield (
        f"{short_count(parameters)} parameters in {len(dry_run.pieces.shapes):,} tensors, {boxes:,} shards of them on "
        f"ranks; a checkpoint has {kinds * saved.total():,} pieces in {len(saved):,} files"
    )
    sockets = max(2 * (len(children_of(rank, size)) + (rank > 0)) + 1 for rank in (0, 1, size - 1))
    yield f"sockets per rank for control, background and the store: at most {sockets}, plus the backend's"
    last = dry_run.steps[-1]
    yield f"samples: {last.first + last.size:,} in {len(dry_run.steps):,} steps, checked on all replicas"
    yield f"simulated in {seconds:.1f} s"


def print_dry_run(config: RunConfig, size: int, estimated: LayoutEstimate) -> ExitCode:
    """Simulates a run that `checked_dry_run` accepted, and prints the result.

    Raises:
        ConfigError: the programs of ranks do not match.
    """
    started_at = time.monotonic()
    dry_run = simulate_run(config, size)
    problems = list(dry_run.problems())
    for line in (*dry_run_lines(dry_run, time.monotonic() - started_at), *memory_lines(estimated)):
        log.line(line.strip())
    if problems:
        more = [f"and {len(problems) - _MOST_SHOWN:,} more"] if len(problems) > _MOST_SHOWN else []
        raise ConfigError([*problems[:_MOST_SHOWN], *more])
    log.line("the programs of all ranks match")
    return ExitCode.DONE
