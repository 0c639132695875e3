"""A layout: how a run is divided over devices, and the flags that ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from megatron.config.sections.pipelines import SCHEDULE_FILE
from megatron.parallel.schedule.actions import Placement
from megatron.parallel.schedule.building import build_schedule
from megatron.parallel.schedule.division import Division
from megatron.parallel.schedule.schedule_files import read_orders

NOTHING, ATTENTION, BLOCKS = "none", "selective", "full"  # what is recomputed
_RECOMPUTE_FLAGS = {
    NOTHING: ("--no-checkpoint-activations",),
    ATTENTION: ("--recompute-granularity", "selective"),
    BLOCKS: ("--recompute-granularity", "full"),
}


@dataclass(frozen=True)
class Layout:
    """How a run is divided over devices.

    Attributes:
        tp, cp, ulysses, ep, pp, dp: the sizes of the axes; `ep` divides `expert_copies`.
        splits_sequence: whether tensor-parallel ranks have different tokens between products.
        schedule: of the pipeline, by name or file.
        chunks: parts of the network on each pipeline rank.
        zero: the ZeRO stage.
        recompute: nothing, attention or whole blocks.
        micro_batch: samples of a pass.
        micro_batches: passes of a step.
        keeps_experts_whole: whether experts are divided over the tensor-parallel ranks too, in place of being split.
    """

    tp: int
    cp: int
    ulysses: int
    ep: int
    pp: int
    dp: int
    splits_sequence: bool
    schedule: str
    chunks: int
    zero: int
    recompute: str
    micro_batch: int
    micro_batches: int
    keeps_experts_whole: bool = False

    @property
    def devices(self) -> int:
        """The ranks of the run."""
        return self.tp * self.cp * self.ulysses * self.pp * self.dp

    @property
    def replicas(self) -> int:
        """Ranks over which gradients are averaged and ZeRO divides its share."""
        return self.dp * self.cp * self.ulysses

    @property
    def expert_copies(self) -> int:
        """Ranks of a stage that hold different experts or copies of them."""
        return self.replicas * (self.tp if self.keeps_experts_whole else 1)

    @property
    def sequence(self) -> int:
        """Ranks that share each sequence."""
        return self.cp * self.ulysses

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.micro_batch * self.micro_batches * self.dp

    def words(self) -> list[str]:
        """The flags that ask for this layout."""
        words = ["--tensor-model-parallel-size", str(self.tp), "--pipeline-model-parallel-size", str(self.pp)]
        words += ["--sequence-parallel" if self.splits_sequence else "--no-sequence-parallel"]
        words += ["--zero-stage", str(self.zero), "--micro-batch-size", str(self.micro_batch)]
        words += ["--global-batch-size", str(self.global_batch), *_RECOMPUTE_FLAGS[self.recompute]]
        if self.pp > 1:
            words += ["--pipeline-schedule", self.schedule]
        if self.chunks > 1:
            words += ["--virtual-pipeline-model-parallel-size", str(self.chunks)]
        # Sizes of 1 as well: the command that this is added to may have another.
        words += ["--context-parallel-size", str(self.cp), "--ds-sequence-parallel-size", str(self.ulysses)]
        words += ["--expert-tensor-parallel-size", "1" if self.keeps_experts_whole else str(self.tp)]
        return [*words, "--expert-model-parallel-size", str(self.ep)]

    def __str__(self) -> str:
        axes = {"tp": self.tp, "cp": self.cp, "ulysses": self.ulysses, "pp": self.pp, "dp": self.dp, "ep": self.ep}
        parts = [f"{name} {size}" for name, size in axes.items() if size > 1 or name == "dp"]
        if self.pp > 1:
            parts.append(self.schedule + (f" x {self.chunks}" if self.chunks > 1 else ""))
        parts += [f"ZeRO {self.zero}", f"recompute {self.recompute}", f"micro-batch {self.micro_batch}"]
        return ", ".join(parts)


@dataclass(frozen=True)
class ScheduleFigures:
    """What a schedule costs.

    Attributes:
        idle: the share of the ranks' time in which they compute nothing.
        alive: for each rank, the most forward passes of chunks whose activations it holds.
        placement: which rank has which chunk.
    """

    idle: float
    alive: tuple[int, ...]
    placement: Placement


@lru_cache(maxsize=4096)
def schedule_figures(name: str, ranks: int, chunks: int, micro_batches: int) -> ScheduleFigures:
    """Idle time and activations of a schedule; those of 1F1B by formula, the others simulated.

    More than a few micro-batches a rank change neither the idle time at the ends of a step nor what is held, so that
    no more are simulated.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021),
    section 2.2.
    """
    if ranks == 1 and chunks == 1:
        return ScheduleFigures(0.0, (1,), Placement.loop(1, 1))
    if name in ("1f1b", "interleaved"):
        warm_up = [ranks - 1 - rank if chunks == 1 else 2 * (ranks - 1 - rank) + (chunks - 1) * ranks
                   for rank in range(ranks)]  # fmt: skip
        alive = tuple(min(after + 1, micro_batches * chunks) for after in warm_up)
        idle = (ranks - 1) / (micro_batches * chunks + ranks - 1)
        return ScheduleFigures(idle, alive, Placement.loop(ranks, chunks))
    if name.endswith(SCHEDULE_FILE):
        placement, count, _ = read_orders(name)
        schedule = build_schedule(name, placement.ranks, len(placement.chunks_of(0)), count)
        return ScheduleFigures(schedule.bubble_ratio, schedule.peak_alive, placement)
    simulated = min(micro_batches, 3 * ranks)
    schedule = build_schedule(name, ranks, chunks, simulated)
    per_pass = schedule.bubble_ratio / (1 - schedule.bubble_ratio) * simulated  # idle time in passes of a micro-batch
    return ScheduleFigures(per_pass / (micro_batches + per_pass), schedule.peak_alive, schedule.placement)


@lru_cache(maxsize=4096)
def blocks_of_chunks(
    blocks: tuple[int, ...], head: int, placement: Placement, division: Division
) -> tuple[tuple[range, ...], tuple[int, ...]]:
    """The blocks of each chunk of the network, and the pipeline ranks that differ: the first one of each kind.

    Args:
        blocks, head: what each block and the head cost.
    """
    bounds = [0, *accumulate(division.counts(blocks, (0, head), placement))]
    chunks = tuple(range(begin, end) for begin, end in pairwise(bounds))
    kinds: dict[object, int] = {}
    for rank in range(placement.ranks):
        own = placement.chunks_of(rank)
        costs = tuple(tuple(blocks[block] for block in chunks[chunk]) for chunk in own)
        kinds.setdefault((costs, 0 in own, len(chunks) - 1 in own), rank)
    return chunks, tuple(kinds.values())
