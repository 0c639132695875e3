"""Settings of pipeline parallelism, and the passes of a global batch through the executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.sections.pipelines import SPLIT_SCHEDULES, is_schedule_file
from megatron.device import GraphCapturer
from megatron.engine.deepspeed_internals.optimizer_views import OwningView
from megatron.engine.gradients.gradient_sum import Partial, Tied
from megatron.engine.micro_batch import DeviceBatch
from megatron.engine.passes.base import Passes
from megatron.engine.passes.plain import PlainPasses, ShardedPasses
from megatron.engine.passes.step_loss import StepLoss
from megatron.engine.pipeline.chunk_graphs import GraphedChunkRunner
from megatron.engine.pipeline.chunk_pass import ChunkRunner
from megatron.engine.pipeline.chunks import Chunks
from megatron.engine.pipeline.deepspeed_pipeline import DeepSpeedPasses
from megatron.engine.pipeline.executor import Executor
from megatron.model.interface.layer_cost import MATRICES_ONLY, TokenWork
from megatron.model.interface.network import LayerSpec, LayerStack
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.schedule.actions import Kind, Placement
from megatron.parallel.schedule.building import build_schedule, forward_programs
from megatron.parallel.schedule.division import BY_COST, Division
from megatron.parallel.schedule.schedule_files import read_orders


@dataclass(frozen=True)
class PipelineSettings:
    """The division of a network over the ranks of a pipeline, and its schedule.

    Attributes:
        schedule: its name, see `build_schedule`.
        chunks_per_rank: number of chunks on each rank.
        by_deepspeed: DeepSpeed's pipeline engine runs 1F1B instead.
        division: the division of blocks over chunks.
        work: the computation per token.
    """

    schedule: str = "1f1b"
    chunks_per_rank: int = 1
    by_deepspeed: bool = False
    division: Division = BY_COST
    work: TokenWork = MATRICES_ONLY

    @property
    def splits_backward(self) -> bool:
        """True if the schedule computes weight gradients separately from input gradients."""
        if is_schedule_file(self.schedule):
            _, _, orders = read_orders(self.schedule)
            return any(kind is Kind.WEIGHT_BACKWARD for order in orders for kind, _, _ in order)
        return self.schedule in SPLIT_SCHEDULES

    def placement(self, ranks: int) -> Placement:
        """The placement of chunks.

        Raises:
            ConfigError: as `build_schedule`.
        """
        if is_schedule_file(self.schedule):
            return read_orders(self.schedule)[0]
        return build_schedule(self.schedule, ranks, self.chunks_per_rank, 1).placement

    def chunks(self, network: Sequence[LayerSpec], axis: Axis, frozen: frozenset[str] = frozenset()) -> Chunks:
        """The chunks of this rank.

        Args:
            axis: the ranks of the pipeline.
            frozen: global names of the parameters that are not trained.

        Raises:
            ConfigError: as `build_schedule`, or there are fewer blocks than chunks.
        """
        placement = self.placement(axis.size)
        return Chunks.of(network, placement, axis.rank, frozen, division=self.division, work=self.work)

    def passes(self, stack: LayerStack, chunks: Chunks, mesh: ParallelMesh, zero_stage: int) -> Passes[Any]:
        """Builds the object that runs micro-batches through the layers of a rank."""
        if self.by_deepspeed and mesh.pp.size > 1:
            return DeepSpeedPasses(stack, mesh)
        if zero_stage == 3:
            return ShardedPasses(stack)
        return PlainPasses(stack) if chunks.count == 1 else PipelinePasses(stack, chunks, self, mesh)


ONE_FORWARD_ONE_BACKWARD = PipelineSettings()


class PipelinePasses(Passes[OwningView]):
    """Runs the programs of a schedule in the executor.

    Args:
        stack: the layers of this rank.
        chunks: their division into chunks.
        settings: the schedule.
        mesh: the mesh.
    """

    def __init__(self, stack: LayerStack, chunks: Chunks, settings: PipelineSettings, mesh: ParallelMesh) -> None:
        super().__init__(stack)
        self._stack, self._chunks, self._settings, self._mesh = stack, chunks, settings, mesh
        self.placement = settings.placement(mesh.pp.size)

    def connect(
        self, deepspeed: Any, view: OwningView, partial: Partial, tied: Tied, enter: Callable[[str], None]
    ) -> None:
        super().connect(deepspeed, view, partial, tied, enter)
        runner = ChunkRunner(self._stack, self._chunks, splits_backward=self._settings.splits_backward)
        view.send_in_backward()
        self.executor = Executor(runner, self._mesh.pp, self._mesh.world, view, enter)

    def use_graphs(self, capturer: GraphCapturer) -> None:
        self.executor.runner = GraphedChunkRunner(self.executor.runner, capturer, accumulates=self._view.is_direct)

    def train(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        """Runs this rank's program, reduces the gradients, and updates."""
        axis, settings = self._mesh.pp, self._settings
        if isinstance(self.executor.runner, GraphedChunkRunner):
            self._view.await_weights()
        schedule = build_schedule(settings.schedule, axis.size, settings.chunks_per_rank, len(batches))
        self.executor.run(schedule.actions[axis.rank], batches, losses, trains=True)
        self._enter("step")
        self._view.reduce()
        self._deepspeed.step()

    def evaluate(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        axis, settings = self._mesh.pp, self._settings
        programs = forward_programs(settings.schedule, axis.size, settings.chunks_per_rank, len(batches))
        self.executor.run(programs[axis.rank], batches, losses, trains=False)
