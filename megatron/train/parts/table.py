"""The parts that a run may have, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.train.part import Part, PartSequence, PartSetup
from megatron.train.parts.activity import ActivityReports
from megatron.train.parts.collecting import CollectingGarbage
from megatron.train.parts.distillation import Distillation
from megatron.train.parts.evaluation_tasks import EvaluationTasks
from megatron.train.parts.keeping import Keeping
from megatron.train.parts.numerics import PoisonedBatches, ReplicaCheck, SkippedRanges, Spikes
from megatron.train.parts.profiling import Profiling
from megatron.train.parts.sample_prompts import SamplePrompts
from megatron.train.parts.slowest_rank import SlowestRankReports
from megatron.train.parts.start_record import StartRecord
from megatron.train.parts.watching import Watching

PART_CLASSES: tuple[type[Part], ...] = (
    SkippedRanges,
    PoisonedBatches,
    Distillation,
    Profiling,
    Spikes,
    ReplicaCheck,
    EvaluationTasks,
    SamplePrompts,
    Watching,
    ActivityReports,
    SlowestRankReports,
    Keeping,
    StartRecord,
    CollectingGarbage,
)


def make_parts(setup: PartSetup, more: Sequence[type[Part]] = ()) -> PartSequence:
    """The parts that the flags ask for; collective over the mesh.

    Args:
        more: parts that a caller adds, called after the others.

    Raises:
        MegatronError: what a flag of a part asks for is not there.
    """
    made = (part.of(setup) for part in (*PART_CLASSES, *more))
    return PartSequence(part for part in made if part is not None)
