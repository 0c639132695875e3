"""Simulates one rank: builds its mesh and meta layers, runs a step and records the messages."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from megatron.checkpoint.saving import SaveLines, SaveOptions, save
from megatron.config import RunConfig
from megatron.config.sections.optimizers import MUON
from megatron.config.sections.pipelines import is_schedule_file
from megatron.data.loader import Batch
from megatron.engine.buckets.averaging import Averaging
from megatron.engine.buckets.flat_bucket import FlatGroup
from megatron.engine.buckets.parameter_groups import is_partial, parameter_groups
from megatron.engine.buckets.weight_gathers import WeightGathers
from megatron.engine.ds_config import buckets_of, deepspeed_config
from megatron.engine.gradients.clipping import Clipping
from megatron.engine.gradients.direct_gradients import DirectGradients
from megatron.engine.gradients.gradient_owner import GradientOwner
from megatron.engine.gradients.gradient_sum import GradientSum
from megatron.engine.gradients.main_gradients import MainGradients
from megatron.engine.gradients.partition_gradients import PartitionGradients
from megatron.engine.optimizers.whole_matrices import DividedMatrix, WholeMatrices
from megatron.engine.passes.step_loss import StepLoss
from megatron.engine.pipeline.chunk_pass import ChunkRunner
from megatron.engine.pipeline.chunks import Chunks
from megatron.engine.pipeline.executor import Executor
from megatron.engine.stage_build import partial_parameters, tied_weights
from megatron.engine.tensor_parts import is_block_matrix
from megatron.model.interface.network import LayerStack
from megatron.model.networks import network_layers
from megatron.parallel.mesh import Axis, ParallelMesh, build_mesh, requested_axes, requested_experts
from megatron.parallel.pieces import PieceKey
from megatron.parallel.schedule.actions import Action, Kind, Program
from megatron.parallel.schedule.building import build_schedule, forward_programs
from megatron.parallel.schedule.schedule_files import read_orders
from megatron.parallel.shard_spec import shard_spec_of
from megatron.train.objectives import build_objective, step_settings
from megatron.train.start_up.engine_opening import pipeline_settings
from trident.plan.dry_run.programs import FlatShare, ProgramEntry, RankProgram
from trident.plan.dry_run.recording import RECEIVE, SEND, RankMessage, RecordedMessages, RecordedTree, fake_world

_TIMEOUT = timedelta(minutes=1)
# The messages of a pass by kind, chunk, and True for all micro-batches except the first.
_Passes = Mapping[tuple[Kind, int, bool], tuple[RankMessage, ...]]
_FORWARD_MESSAGES = (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)


def mesh_at(config: RunConfig, rank: int, size: int) -> ParallelMesh:
    """The mesh of a rank without process groups."""
    experts = requested_experts(config.parallel)
    mesh = ParallelMesh.at(requested_axes(config.parallel, size), rank, "meta", experts=experts)
    return mesh.configured(config.parallel)


def build_layers(config: RunConfig, mesh: ParallelMesh) -> tuple[Chunks, LayerStack]:
    """The layers of a rank on the meta device."""
    network = network_layers(config.model, mesh)
    chunks = pipeline_settings(config).chunks(network, mesh.pp)
    with torch.device("meta"):
        return chunks, LayerStack(chunks.specs).to(getattr(torch, config.precision.dtype_name))


def simulate_rank(
    config: RunConfig, rank: int, size: int, batches: Sequence[int], results: dict[Any, Any] | None = None
) -> list[RankProgram]:
    """Simulates a rank of a run that `dry_run_problems` accepts.

    Args:
        batches: global batch sizes.
        results: cache of operations, shared by ranks.

    Returns:
        its programs: of a step for each global batch size, of an evaluation and of a save.
    """
    with fake_world(rank, size):
        axes, experts = requested_axes(config.parallel, size), requested_experts(config.parallel)
        mesh = build_mesh(axes, "meta", 0, _TIMEOUT, experts=experts).configured(config.parallel)
        chunks, stack = build_layers(config, mesh)
        with torch.device("meta"):
            recorded = RecordedMessages(rank, {} if results is None else results)
            return RankSimulation(config, mesh, chunks, stack, recorded).programs(batches)


class RankSimulation:
    """The simulation of one rank."""

    def __init__(
        self, config: RunConfig, mesh: ParallelMesh, chunks: Chunks, stack: LayerStack, recorded: RecordedMessages
    ) -> None:
        self._config, self._mesh, self._chunks, self._stack, self._recorded = config, mesh, chunks, stack, recorded
        self._phases: list[tuple[str, tuple[RankMessage, ...]]] = []
        self._trained = [each for each in stack.parameters() if each.requires_grad]
        is_expert = {id(each): mesh.ep.name in shard_spec_of(each).split_axes for each in self._trained}
        dtype = (
            torch.float32 if config.parallel.effective_zero_stage < 2 else getattr(torch, config.precision.dtype_name)
        )
        experts = Averaging(mesh.expert_gradient, dtype, copies=mesh.gradient.size)
        self._averaging = Averaging(
            mesh.gradient,
            dtype,
            experts=experts if any(is_expert.values()) else None,
            is_expert=lambda parameter: is_expert[id(parameter)],
        )
        self._tied = tied_weights(network_layers(config.model, mesh), stack, mesh)
        self._has_matrices = config.optim.optimizer == MUON
        self._buckets = buckets_of(deepspeed_config(config), mesh.gradient.size)
        self._order = {id(parameter): index for index, parameter in enumerate(self._trained)}
        self._groups = self._flat_groups()

    def programs(self, batches: Sequence[int]) -> list[RankProgram]:
        """Simulates a step, an evaluation and a save."""
        config, mesh, rank = self._config, self._mesh, self._mesh.world.rank
        with self._recorded:
            sums, clipping = self._gradient_sum(), Clipping(1.0, mesh.model, mesh.device)
            # Messages that only the last pass starts are listed after it.
            gradients = GradientOwner(sums, clipping, self._trained, overlaps=sums.sends_each_pass)
            gradients.send_in_backward()
            gradients.sum_over_ranks(partial_parameters(self._stack), self._tied)
            losses, start, passes = self._run_few_micro_batches(*self._few_micro_batches(), gradients)
            end = list(self._after_passes(gradients, losses))
            evaluation = list(self._evaluation(batches[0], gradients)) if config.evaluation.eval_iters else []
            saved = list(self._save()) if config.saving.save is not None else []
        steps = [(*start, *self._expanded(self._program(batch), passes), *end) for batch in batches]
        weights = sum(each.numel() * each.element_size() for each in self._stack.parameters())
        axes = (*mesh.axes, mesh.embedding, mesh.model, mesh.gradient, mesh.loss, mesh.ep, mesh.expert_gradient)
        groups, shares = {axis.name: axis.ranks for axis in axes}, self._shares()
        return [RankProgram(rank, tuple(each), groups, weights, shares) for each in (*steps, evaluation, saved)]

    def _gradient_sum(self) -> GradientSum:
        """The engine's gradient accumulator (`engine/deepspeed_internals/optimizer_views.py`)."""
        stage, averaging = self._config.parallel.effective_zero_stage, self._averaging
        if stage == 0:
            return DirectGradients(self._trained, _all, averaging, self._buckets.elements, is_partial)
        sizes = [group.length // (1 if stage == 1 else self._axis(group).size) for group in self._groups]
        buffers = [torch.empty(size, dtype=torch.float32, device="meta") for size in sizes]
        if stage == 1:
            return MainGradients(buffers, self._groups, _all, averaging, order=self._order)
        return PartitionGradients(buffers, self._groups, _all, averaging, self._order)

    def _axis(self, group: FlatGroup) -> Axis:
        return self._averaging.of(group.parameters[0]).axis

    def _run_few_micro_batches(
        self, program: Program, count: int, gradients: GradientOwner, *, trains: bool = True
    ) -> tuple[StepLoss, list[ProgramEntry], _Passes]:
        """Runs a program; returns its losses, its messages before the first pass, and the messages of each kind of
        pass and chunk without those between stages.
        """
        config, mesh = self._config, self._mesh
        settings = dataclasses.replace(step_settings(config, mesh), sequence_parallel=mesh.sequence_parallel)
        losses = StepLoss(build_objective(config, mesh), settings, mesh, 1.0, count)
        shape = config.optim.micro_batch_size, config.data.seq_length
        tokens = np.zeros(shape, np.int64)
        batch = Batch(tokens, tokens, np.ones(shape, np.float32), np.arange(shape[0]), None)
        given = losses.prepare([batch] * count, with_inputs=self._chunks.has_first, with_targets=self._chunks.has_last)
        runner = ChunkRunner(
            self._stack, self._chunks, splits_backward=pipeline_settings(config).splits_backward and trains
        )
        start, self._phases, self._phase = self._recorded.take(), [], ""
        self._hidden = math.prod(settings.hidden_shape(*given[0].shape))
        self._dtype = str(settings.dtype).removeprefix("torch.")
        self._stack.train(trains)
        Executor(runner, mesh.pp, mesh.world, gradients, self._enter).run(program, given, losses, trains=trains)
        self._enter("")
        actions = (action for action in program if not action.kind.is_message)
        simulated = (messages for phase, messages in self._phases if phase in ("forward", "backward"))
        passes: dict[tuple[Kind, int, bool], tuple[RankMessage, ...]] = {}
        for action, messages in zip(actions, simulated, strict=True):
            passes.setdefault((action.kind, action.chunk, action.micro_batch > 0), messages)
        return losses, list(self._events("start", start)), passes

    def _few_micro_batches(self) -> tuple[Program, int]:
        """The program to run, and its micro-batches: two, or enough for every kind of pass of a schedule file."""
        pipeline, axis = pipeline_settings(self._config), self._mesh.pp
        if not is_schedule_file(pipeline.schedule):
            return build_schedule(pipeline.schedule, axis.size, pipeline.chunks_per_rank, 2).actions[axis.rank], 2
        _, count, _ = read_orders(pipeline.schedule)
        chosen = [*range(min(2, count))]
        actions = build_schedule(pipeline.schedule, axis.size, pipeline.chunks_per_rank, count).actions[axis.rank]
        passes = {batch: {(each.kind, each.chunk) for each in actions if each.micro_batch == batch}
                  for batch in range(count)}  # fmt: skip
        for batch, kinds in passes.items():
            if not kinds <= set().union(*(passes[each] for each in chosen)):
                chosen.append(batch)
        few = (each for each in actions if each.micro_batch in chosen)
        return tuple(dataclasses.replace(each, micro_batch=chosen.index(each.micro_batch)) for each in few), len(chosen)

    def _enter(self, phase: str) -> None:
        self._phases.append((self._phase, self._recorded.take()))
        self._phase = phase

    def _micro_batches(self, batch: int) -> int:
        return batch // (self._config.optim.micro_batch_size * self._config.parallel.data_parallel_size)

    def _program(self, batch: int) -> Program:
        """The actions of this rank in a step."""
        pipeline, axis = pipeline_settings(self._config), self._mesh.pp
        count = self._micro_batches(batch)
        return build_schedule(pipeline.schedule, axis.size, pipeline.chunks_per_rank, count).actions[axis.rank]

    def _expanded(self, program: Program, passes: _Passes) -> Iterator[ProgramEntry]:
        """The messages of all micro-batches of a program, including those between stages."""
        for action in program:
            if action.kind.is_message:
                yield ProgramEntry(self._between(action), _crossing(action))
            else:
                first = passes.get((action.kind, action.chunk, False), ())
                later = passes.get((action.kind, action.chunk, True), first)
                yield from self._events(str(action), later if action.micro_batch else first)

    def _evaluation(self, batch: int, gradients: GradientOwner) -> Iterator[ProgramEntry]:
        """The messages of an evaluation of one global batch."""
        pipeline, axis = pipeline_settings(self._config), self._mesh.pp
        few, program = (
            forward_programs(pipeline.schedule, axis.size, pipeline.chunks_per_rank, count)[axis.rank]
            for count in (1, self._micro_batches(batch))
        )
        losses, start, passes = self._run_few_micro_batches(few, 1, gradients, trains=False)
        losses.totals.over_ranks(self._mesh)
        end = self._recorded.take()
        yield from (*start, *self._expanded(program, passes), *self._events("loss", end))

    def _save(self) -> Iterator[ProgramEntry]:
        """The messages of a save; rank 0 writes one element into a temporary folder."""
        mesh, recorded, taken = self._mesh, self._recorded, dict[PieceKey, torch.Tensor]()
        with torch.device("cpu"), TemporaryDirectory() as folder:
            if mesh.world.rank == 0:
                taken[PieceKey("simulated", "master", (1,), (0,), (1,), 0, 1)] = torch.zeros(1)
            tree: Any = RecordedTree(recorded, mesh.control.ranks)
            mesh = dataclasses.replace(mesh, control=dataclasses.replace(mesh.control, group=None, tree=tree))
            options = SaveOptions(lines=SaveLines(lambda *_: None, lambda *_: None))
            save(Path(folder), 1, taken.items(), {}, mesh, options)
        return self._events("save", recorded.take())

    def _between(self, action: Action) -> RankMessage:
        kind = SEND if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD) else RECEIVE
        ends = self._mesh.world.rank, self._mesh.pp.ranks[action.peer or 0]
        return RankMessage(kind, ends, self._hidden, self._dtype)

    def _after_passes(self, gradients: GradientOwner, losses: StepLoss) -> Iterator[ProgramEntry]:
        """The messages after the passes: sums of gradients, norm, loss, and updated weights."""
        gradients.reduce()
        yield from self._events("gradients", self._recorded.take())
        gradients.measure()
        losses.totals.over_ranks(self._mesh)
        yield from self._events("norm and loss", self._recorded.take())
        yield from self._matrix_messages() if self._has_matrices else ()
        if 1 <= self._config.parallel.effective_zero_stage <= 2:
            flats = [torch.empty(group.length, dtype=self._trained[0].dtype) for group in self._groups]
            WeightGathers(flats, [*map(self._axis, self._groups)], self._groups, self._order, overlaps=False).start()
            yield from self._events("weights", self._recorded.take())

    def _matrix_messages(self) -> Iterator[ProgramEntry]:
        """The all-to-alls that send Muon's matrices to their owners and back."""
        # Rows depend on the matrices that a rank owns: compare the elements of all matrices in a bucket instead.
        matrices = [
            DividedMatrix(shard_spec_of(each), shard_spec_of(each).replicas(self._mesh), self._ranges(group, index))
            for group in self._groups
            if is_block_matrix(group.parameters[0])
            for index, each in enumerate(group.parameters)
        ]
        for numbers, whole in WholeMatrices.buckets(matrices):
            chosen = [matrices[number] for number in numbers]
            whole.transform([torch.empty(each.ranges[each.replicas.rank][1]) for each in chosen], _nothing)
            elements = sum(each.shard_numel for each in chosen)
            for message in self._recorded.take():
                yield ProgramEntry(dataclasses.replace(message, elements=elements, sent=(), received=()), "matrices")

    def _ranges(self, group: FlatGroup, index: int) -> tuple[tuple[int, int], ...]:
        """First element and number of elements of a parameter that each rank updates."""
        numel, ranks = group.parameters[index].numel(), self._axis(group).size
        if not self._config.parallel.effective_zero_stage:
            return ((0, numel),) * ranks
        shard, start = group.length // ranks, group.starts[index]
        bounds = [(max(0, rank * shard - start), min(numel, (rank + 1) * shard - start)) for rank in range(ranks)]
        return tuple((first, end - first) if end > first else (0, 0) for first, end in bounds)

    def _shares(self) -> tuple[FlatShare, ...]:
        """The shares of flat groups, or of each tensor without ZeRO."""
        groups = self._groups
        if not self._config.parallel.effective_zero_stage:
            groups = [FlatGroup((each,), (0,), each.numel()) for each in self._trained]
        return tuple(FlatShare(self._axis(group).ranks, group.length, self._saved(group)) for group in groups)

    def _saved(self, group: FlatGroup) -> tuple[tuple[int, int], ...]:
        return tuple(
            (start, start + each.numel())
            for each, start in zip(group.parameters, group.starts, strict=True)
            if shard_spec_of(each).is_counted(self._mesh)
        )

    def _flat_groups(self) -> list[FlatGroup]:
        """Parameters in the flat buffers of the optimizer's groups, padded to equal shards."""

        def kind_of(parameter: nn.Parameter) -> tuple[bool, ...]:
            is_orthogonal = self._has_matrices and is_block_matrix(parameter)
            return not shard_spec_of(parameter).is_matrix, self._averaging.is_expert(parameter), is_orthogonal

        elements = self._buckets.elements if self._config.parallel.effective_zero_stage in (1, 2) else None
        chunks, tied = self._chunks.numbers(self._stack), [weight for weight, _ in self._tied]
        groups = []
        for members in parameter_groups(self._trained, kind_of, self._mesh, tied, chunks, elements):
            starts = [0, *itertools.accumulate(each.numel() for each in members)]
            ranks = self._averaging.of(members[0]).axis.size
            groups.append(FlatGroup(tuple(members), tuple(starts[:-1]), -(-starts[-1] // ranks) * ranks))
        return groups

    @staticmethod
    def _events(part: str, messages: Sequence[RankMessage]) -> Iterator[ProgramEntry]:
        for message in messages:
            yield ProgramEntry(message, part)


def _crossing(action: Action) -> str:
    """The content of a message between stages, the same at both ends."""
    is_forward = action.kind in _FORWARD_MESSAGES
    receives = action.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)
    boundary = action.chunk - receives if is_forward else action.chunk + receives
    return f"{'output' if is_forward else 'gradient'} of chunk {boundary}, micro-batch {action.micro_batch}"


def _all(parameter: nn.Parameter) -> bool:
    return True


def _nothing(*_: object) -> None:
    """Replaces orthogonalization, which sends nothing."""
