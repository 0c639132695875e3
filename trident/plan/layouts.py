"""A layout: how a run is divided over devices, and the flags that ask for it."""

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

# Rounds, of as many micro-batches as there are ranks, whose times say what more of them take. Between the two numbers
# are whole periods of most schedules, whose rounds repeat after 1, 3 or 4; idle shares come out right within 0.01.
_FEW_ROUNDS, _MOST_ROUNDS = 16, 64
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
        return self.tp * self.cp * self.ulysses * self.pp * self.dp

    @property
    def replicas(self) -> int:
        """Ranks over which gradients are averaged and ZeRO divides its share."""
        return self.dp * self.cp * self.ulysses

    @property
    def expert_copies(self) -> int:
        """Ranks of a stage that hold different experts or copies of them."""
        return self.replicas * (self.tp if self.keeps_experts_whole else 1)

    def zero_stage(self, weight_bytes: int) -> int:
        """The ZeRO stage that is run: the fp32 copies of weights in half precision are always divided."""
        return self.zero if weight_bytes == 4 else max(self.zero, 1)

    @property
    def sequence(self) -> int:
        """Ranks that share each sequence."""
        return self.cp * self.ulysses

    @property
    def recomputes_attention(self) -> bool:
        """True where attention by itself is computed anew in backward; in a ring, which keeps no scores, never."""
        return self.recompute == ATTENTION and self.cp == 1

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


def costs_of_schedule(name: str, ranks: int, chunks: int, micro_batches: int) -> ScheduleCosts:
    """What a schedule costs, as `schedule_costs` says; rounds beyond `_MOST_ROUNDS` are not simulated: each takes as
    long as the later ones of these.
    """
    if ranks == 1 and chunks == 1:
        return ScheduleCosts(0.0, (1,), Placement.loop(1, 1))
    rounds, last = divmod(micro_batches, ranks)
    if rounds <= _MOST_ROUNDS or is_schedule_file(name):
        return schedule_costs(name, ranks, chunks, micro_batches)
    counts = [_FEW_ROUNDS * ranks + last, _MOST_ROUNDS * ranks + last]
    few, many = (schedule_costs(name, ranks, chunks, count) for count in counts)
    # Times in passes of a micro-batch through the chunks of a rank.
    before, after = (count / (1 - costs.idle) for count, costs in zip(counts, (few, many), strict=True))
    end = after + (micro_batches - counts[1]) * max(1.0, (after - before) / (counts[1] - counts[0]))
    return dataclasses.replace(many, idle=1 - micro_batches / end)


@lru_cache(maxsize=4096)
def blocks_of_chunks(
    blocks: tuple[int, ...], head: int, placement: Placement, division: Division
) -> tuple[tuple[range, ...], Mapping[int, int]]:
    """The blocks of each chunk of the network, and the pipeline ranks that differ: the first one of each kind, and how
    many there are of it.

    Args:
        blocks, head: what each block and the head cost.
    """
    bounds = [0, *accumulate(division.counts(blocks, (0, head), placement))]
    chunks = tuple(range(begin, end) for begin, end in pairwise(bounds))
    kinds: dict[object, list[int]] = {}
    for rank in range(placement.ranks):
        own = placement.chunks_of(rank)
        costs = tuple(tuple(blocks[block] for block in chunks[chunk]) for chunk in own)
        kinds.setdefault((costs, 0 in own, len(chunks) - 1 in own), []).append(rank)
    return chunks, MappingProxyType({ranks[0]: len(ranks) for ranks in kinds.values()})
