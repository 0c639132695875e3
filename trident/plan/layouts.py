"""A layout: the division of a run over devices, and the flags that select it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from types import MappingProxyType

from megatron.config.sections.pipelines import is_schedule_file
from megatron.parallel.schedule.actions import Placement
from megatron.parallel.schedule.building import ScheduleCosts, schedule_costs
from megatron.parallel.schedule.division import Division

# Rounds (one micro-batch per rank) that are simulated to extrapolate the time of more. Their difference is a multiple
# of the period of most schedules (1, 3 or 4 rounds); idle ratios are then correct within 0.01.
_FEW_ROUNDS, _MOST_ROUNDS = 16, 64
NOTHING, ATTENTION, BLOCKS = "none", "selective", "full"  # recomputation
_RECOMPUTE_FLAGS = {
    NOTHING: ("--no-checkpoint-activations",),
    ATTENTION: ("--recompute-granularity", "selective"),
    BLOCKS: ("--recompute-granularity", "full"),
}


@dataclass(frozen=True)
class Layout:
    """The division of a run over devices.

    Attributes:
        tp, cp, ulysses, ep, pp, dp: the sizes of the axes; `ep` divides `expert_copies`.
        splits_sequence: sequence parallelism over the tensor-parallel ranks.
        schedule: the pipeline schedule, a name or a file.
        chunks: model chunks per pipeline rank.
        zero: the ZeRO stage.
        recompute: none, attention or whole blocks.
        micro_batch: samples per micro-batch.
        micro_batches: micro-batches per step.
        keeps_experts_whole: tensor-parallel ranks hold different experts instead of shards of each.
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
        return self.tp * self.cp * self.ulysses * self.pp * self.dp

    @property
    def replicas(self) -> int:
        """Ranks that average gradients and partition ZeRO's state."""
        return self.dp * self.cp * self.ulysses

    @property
    def expert_copies(self) -> int:
        """Ranks of a stage that hold different experts or replicas of them."""
        return self.replicas * (self.tp if self.keeps_experts_whole else 1)

    def zero_stage(self, weight_bytes: int) -> int:
        """The effective ZeRO stage: master weights of half-precision training are always partitioned."""
        return self.zero if weight_bytes == 4 else max(self.zero, 1)

    @property
    def sequence(self) -> int:
        """Ranks that share each sequence."""
        return self.cp * self.ulysses

    @property
    def recomputes_attention(self) -> bool:
        """True if attention alone is recomputed in backward; never in a ring, which stores no scores."""
        return self.recompute == ATTENTION and self.cp == 1

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.micro_batch * self.micro_batches * self.dp

    def flags(self) -> list[str]:
        """The flags that select this layout."""
        flags = ["--tensor-model-parallel-size", str(self.tp), "--pipeline-model-parallel-size", str(self.pp)]
        flags += ["--sequence-parallel" if self.splits_sequence else "--no-sequence-parallel"]
        flags += ["--zero-stage", str(self.zero), "--micro-batch-size", str(self.micro_batch)]
        flags += ["--global-batch-size", str(self.global_batch), *_RECOMPUTE_FLAGS[self.recompute]]
        if self.pp > 1:
            flags += ["--pipeline-schedule", self.schedule]
        if self.chunks > 1:
            flags += ["--virtual-pipeline-model-parallel-size", str(self.chunks)]
        # Sizes of 1 too: they override other sizes in the command.
        flags += ["--context-parallel-size", str(self.cp), "--ds-sequence-parallel-size", str(self.ulysses)]
        flags += ["--expert-tensor-parallel-size", "1" if self.keeps_experts_whole else str(self.tp)]
        return [*flags, "--expert-model-parallel-size", str(self.ep)]

    def __str__(self) -> str:
        axes = {"tp": self.tp, "cp": self.cp, "ulysses": self.ulysses, "pp": self.pp, "dp": self.dp, "ep": self.ep}
        parts = [f"{name} {size}" for name, size in axes.items() if size > 1 or name == "dp"]
        if self.pp > 1:
            parts.append(self.schedule + (f" x {self.chunks}" if self.chunks > 1 else ""))
        parts += [f"ZeRO {self.zero}", f"recompute {self.recompute}", f"micro-batch {self.micro_batch}"]
        return ", ".join(parts)


def costs_of_schedule(name: str, ranks: int, chunks: int, micro_batches: int) -> ScheduleCosts:
    """The costs of a schedule, see `schedule_costs`; rounds beyond `_MOST_ROUNDS` are extrapolated."""
    if ranks == 1 and chunks == 1:
        return ScheduleCosts(0.0, (1,), Placement.loop(1, 1))
    rounds, last = divmod(micro_batches, ranks)
    if rounds <= _MOST_ROUNDS or is_schedule_file(name):
        return schedule_costs(name, ranks, chunks, micro_batches)
    counts = [_FEW_ROUNDS * ranks + last, _MOST_ROUNDS * ranks + last]
    few, many = (schedule_costs(name, ranks, chunks, count) for count in counts)
    # In units of a micro-batch's pass through the chunks of a rank.
    before, after = (count / (1 - costs.idle) for count, costs in zip(counts, (few, many), strict=True))
    end = after + (micro_batches - counts[1]) * max(1.0, (after - before) / (counts[1] - counts[0]))
    return dataclasses.replace(many, idle=1 - micro_batches / end)


@lru_cache(maxsize=4096)
def blocks_of_chunks(
    blocks: tuple[int, ...], head: int, placement: Placement, division: Division
) -> tuple[tuple[range, ...], Mapping[int, int]]:
    """Divides blocks into chunks; also groups equal pipeline ranks: the first rank of each kind and their number.

    Args:
        blocks, head: the costs of each block and of the head.
    """
    bounds = [0, *accumulate(division.counts(blocks, (0, head), placement))]
    chunks = tuple(range(start, end) for start, end in pairwise(bounds))
    kinds: dict[object, list[int]] = {}
    for rank in range(placement.ranks):
        local = placement.chunks_of(rank)
        costs = tuple(tuple(blocks[block] for block in chunks[chunk]) for chunk in local)
        kinds.setdefault((costs, 0 in local, len(chunks) - 1 in local), []).append(rank)
    return chunks, MappingProxyType({ranks[0]: len(ranks) for ranks in kinds.values()})
